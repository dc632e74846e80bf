"""LoRA and base into deployable weights, streamed and verified; the loader of both."""

from merge.api import router
from merge.folder import content_files, validate_model_folder
from merge.load import (
    BaseModel,
    attach_adapter,
    identify_base,
    load_base,
    load_tokenizer,
    resolve_base,
)
from merge.plan import Plan, make_plan
from merge.request import FORMAT
from merge.service import MergeService

__all__ = [
    "FORMAT",
    "BaseModel",
    "MergeService",
    "Plan",
    "attach_adapter",
    "content_files",
    "identify_base",
    "load_base",
    "load_tokenizer",
    "make_plan",
    "resolve_base",
    "router",
    "validate_model_folder",
]
