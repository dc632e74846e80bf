"""The wire of the ``tinker`` SDK (0.38), served under ``/api/v1``."""

from session_core.dialects.tinker.options import Options
from session_core.dialects.tinker.routes import LARGER, router

__all__ = ["LARGER", "Options", "router"]
