"""``python -m slipway``."""

from slipway.cli import main

main()
