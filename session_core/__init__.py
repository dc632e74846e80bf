"""Training sessions: ordered, durable operations on LoRA runs that share one base model."""

from session_core.lines import Limits
from session_core.quotas import Quota
from session_core.results import Outcome
from session_core.service import SessionService

__all__ = ["Limits", "Outcome", "Quota", "SessionService"]
