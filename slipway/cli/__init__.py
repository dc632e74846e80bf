"""The ``slipway`` command."""

from __future__ import annotations

import sys

from slipway.cli.main import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an error is one line on standard error and exit code 1."""
    from registry import SlipwayError

    try:
        app()
    except SlipwayError as error:
        print(f"Error: {error.message}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except OSError as error:
        # A folder that cannot be written, a disk that is full: nothing a traceback explains.
        where = f": {error.filename}" if error.filename else ""
        print(f"Error: {error.strerror or error}{where}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
