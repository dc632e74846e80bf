"""session_core."""
