"""slipway."""
