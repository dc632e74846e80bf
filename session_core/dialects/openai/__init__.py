"""OpenAI's completions on a live session, for the gateway to put before its clients."""

from session_core.dialects.openai.routes import router

__all__ = ["router"]
