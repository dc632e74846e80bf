"""LoRA and base into deployable weights, streamed and verified; the loader of both."""

from merge.folder import content_files, validate_model_folder
from merge.load import (
    BaseModel,
    attach_adapter,
    identify_base,
    load_base,
    load_tokenizer,
    resolve_base,
)

__all__ = [
    "BaseModel",
    "attach_adapter",
    "content_files",
    "identify_base",
    "load_base",
    "load_tokenizer",
    "resolve_base",
    "validate_model_folder",
]
