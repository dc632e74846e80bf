"""JSON bodies of the SDK's requests. Unknown fields are ignored: the SDK may grow."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, AwareDatetime, BaseModel, Field

from registry import InvalidInput, NotServed
from session_core.dialects.tinker.protobuf import dense_of_csr
from session_core.operations import Array
from session_core.requests import MAX_SAMPLES
from session_core.saved import check_ttl

# A name, an id: longer ones are nobody's.
LONGEST = 512
# Metadata as JSON, in bytes, and how deep it may be.
LARGEST_METADATA = 64 * 1024
DEEPEST_METADATA = 8
# The range of the counters on the wire.
LARGEST_COUNT = 2**31 - 1
LARGEST_SEQ = 2**63 - 1


def _storable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which UTF-8 cannot hold") from None
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """JSON that every database can hold, no deeper and no larger than it may be."""
    level: list[Any] = [metadata]
    for _ in range(DEEPEST_METADATA):
        level = [inner for outer in level for inner in _inside(outer)]
        for value in level:
            if isinstance(value, str):
                _storable(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError("holds a number that is not finite")
    if any(_inside(value) for value in level):
        raise ValueError(f"is nested more than {DEEPEST_METADATA} deep")
    if len(json.dumps(metadata)) > LARGEST_METADATA:
        raise ValueError(f"is larger than {LARGEST_METADATA} bytes")
    return metadata


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


# A name or an id; what a person writes; what a client keeps with a thing.
Name = Annotated[str, Field(max_length=LONGEST), AfterValidator(_storable)]
Words = Annotated[str, Field(max_length=4096), AfterValidator(_storable)]
Metadata = Annotated[dict[str, Any], AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]


class CreateSession(BaseModel):
    """Open a session."""

    tags: list[Name] = Field(default=[], max_length=100)
    user_metadata: Metadata | None = None
    sdk_version: Name | None = None
    display_name: Name | None = None
    project_id: Name | None = None


class SessionRef(BaseModel):
    """A body that names a session."""

    session_id: Name


class LoraConfig(BaseModel):
    """What of the model gets a LoRA, and how large it is."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BaseModel):
    """Which optimizer a run has; AdamW is the one there is."""

    type: Name = "adamw"


class CreateModel(BaseModel):
    """Create a run."""

    session_id: Name
    model_seq_id: Count
    base_model: Name
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class ModelRef(BaseModel):
    """A body that names a run."""

    model_id: Name


class OptimStep(BaseModel):
    """One step of the optimizer; its parameters are checked where they are used."""

    model_id: Name
    seq_id: int | None = None
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    def adam(self) -> dict[str, Any]:
        """Adam's parameters. Raises: InvalidInput: if another optimizer's are given."""
        if self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type")
            raise InvalidInput(f"optimizer {kind!r} is not served here: use AdamParams")
        return {name: value for name, value in self.adam_params.items() if name != "type"}


class SaveWeights(BaseModel):
    """Save a state that resumes training."""

    model_id: Name
    seq_id: int | None = None
    path: Name | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None

    def params(self, seq: int) -> dict[str, Any]:
        """As an operation's parameters; a save without a name is named by its sequence id.

        Raises: InvalidInput: if the time to live is out of bounds.
        """
        return {
            "name": self.path or f"{seq:06d}",
            "overwrite": self.overwrite,
            "ttl_seconds": check_ttl(self.ttl_seconds),
            "user_metadata": self.user_metadata or {},
        }


class SaveWeightsForSampler(BaseModel):
    """Save weights to sample from: named ones, or a snapshot for a sampler."""

    model_id: Name
    seq_id: int | None = None
    path: Name | None = None
    sampling_session_seq_id: Count | None = None
    kind: Name = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None

    def params(self) -> dict[str, Any]:
        """As an operation's parameters.

        Raises:
            NotServed: for a sampling client of another kind.
            InvalidInput: if it has no name and no number, or an unbounded time to live.
        """
        if self.kind != "snapshot":
            raise NotServed(
                f"a sampling client of kind {self.kind!r} is not served: take a snapshot, which "
                "every save_weights_and_get_sampling_client makes by default"
            )
        if self.path is None:
            if self.sampling_session_seq_id is None:
                raise InvalidInput("a save without a name needs a sampling_session_seq_id")
            return {"sampling_session_seq_id": self.sampling_session_seq_id}
        return {
            "name": self.path,
            "ttl_seconds": check_ttl(self.ttl_seconds),
            "user_metadata": self.user_metadata or {},
        }


class SaveWeightsExternal(BaseModel):
    """Export a run's adapter, to be downloaded."""

    model_id: Name
    seq_id: int | None = None
    path: Name
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None

    def params(self) -> dict[str, Any]:
        """As an operation's parameters.

        Raises:
            NotServed: if the files are to be encrypted.
            InvalidInput: if the time to live is out of bounds.
        """
        if self.age_encryption_recipients:
            raise NotServed(
                "age_encryption_recipients is not served: export without, and encrypt the files "
                "where they were downloaded to"
            )
        return {"name": self.path, "external": True, "ttl_seconds": check_ttl(self.ttl_seconds)}


class LoadWeights(BaseModel):
    """Load what was saved, into a run that exists or a new one."""

    path: Name
    optimizer: bool
    model_id: Name | None = None
    seq_id: int | None = None
    session_id: Name | None = None
    model_seq_id: Count | None = None
    base_model: Name | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata | None = None
    weights_access_token: str | None = None


class JoinSamplingSession(BaseModel):
    """Ask for a number of one's own among a sampler's clients."""

    sampling_session_id: Name


class CreateSamplingSession(BaseModel):
    """Create a sampler."""

    session_id: Name
    sampling_session_seq_id: Count
    base_model: Name | None = None
    model_path: Name | None = None


class Chunk(BaseModel):
    """A piece of a prompt; only text is served here."""

    type: Name = "encoded_text"
    tokens: list[int] = []


class Prompt(BaseModel):
    """A prompt in pieces."""

    chunks: list[Chunk]

    def tokens(self) -> list[int]:
        """All tokens. Raises: InvalidInput: if there is anything but text."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise InvalidInput(f"a chunk of type {chunk.type!r} is not served: only text is")
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(BaseModel):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Tensor(BaseModel):
    """A tensor, dense or in compressed sparse rows."""

    data: list[int]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def arrays(self, name: str) -> dict[str, Array]:
        """As arrays of an operation: the dense one, -1 where a sparse one lists nothing, and
        then where its numbers stand.

        Raises: InvalidInput: if the numbers do not fill the shape.
        """
        if len(self.shape) != 2 or not all(0 <= extent < 2**20 for extent in self.shape):
            raise InvalidInput(f"{name} must have two dimensions, not shape {self.shape}")
        if any(not -(2**31) <= number < 2**31 for number in self.data):
            raise InvalidInput(f"{name} holds token ids that no vocabulary holds")
        rows, width = self.shape
        data = np.array(self.data, np.int64)
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            if len(data) != rows * width:
                raise InvalidInput(f"{name}: {len(data)} numbers do not fill shape {self.shape}")
            return {name: data.reshape(rows, width)}
        dense = dense_of_csr(
            name,
            data,
            np.array(self.sparse_crow_indices, np.int64),
            np.array(self.sparse_col_indices, np.int64),
            (rows, width),
            fill=-1,
        )
        places = np.repeat(np.arange(rows), np.diff(self.sparse_crow_indices)) * width
        return {name: dense, f"{name}.places": places + np.array(self.sparse_col_indices)}


class Sample(BaseModel):
    """A sampling request."""

    sampling_session_id: Name | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    seq_id: int | None = Field(default=None, ge=0, le=LARGEST_SEQ)
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def params(self) -> dict[str, Any]:
        """As a sample operation's parameters.

        Raises: InvalidInput: naming what is asked for and not served.
        """
        if self.record_stability_info:
            raise InvalidInput("record_stability_info is not served here")
        if self.sampling_session_id is None:
            raise InvalidInput("a sample needs a sampling_session_id: create a sampling client")
        return {
            **self.sampling_params.model_dump(),
            "num_samples": self.num_samples,
            "prompt_logprobs": bool(self.prompt_logprobs),
            "top_prompt": self.topk_prompt_logprobs,
            "top_sample": self.topk_sample_logprobs,
            "last_scored": self.prompt_logprobs_last_n,
            "alternatives": self.prompt_alt_tokens_k,
        }


class RequestRef(BaseModel):
    """Name a request."""

    request_id: Name


class RetrieveFuture(RequestRef):
    """Ask for a result."""

    allow_metadata_only: bool = False


class FinishReason(BaseModel):
    """Why a client's session ended."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(BaseModel):
    """A client's session ends."""

    reason: FinishReason = FinishReason()
    detail: Words | None = None


class WeightsInfo(BaseModel):
    """Ask what a path holds."""

    tinker_path: Name


class SetTtl(BaseModel):
    """When a path expires, counted from now; never without a number."""

    ttl_seconds: int | None = None


class CopyWeights(BaseModel):
    """Give what is saved a second path, in a session's run or a project's."""

    source_path: Name
    session_id: Name | None = None
    model_seq_id: Count | None = None
    destination_project_id: Name | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class AssignProject(BaseModel):
    """Put a session into a project."""

    project_id: Name = Field(min_length=1)


class SearchOwner(BaseModel):
    """Whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Name] = Field(default=[], max_length=10)


class SearchStatus(BaseModel):
    """A status to search for."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchCursor(BaseModel):
    """Where the next page begins."""

    last_created_at: AwareDatetime
    last_session_id: Name

    def after(self) -> tuple[datetime, str]:
        """The last session's time and id."""
        return self.last_created_at, self.last_session_id


class SearchSessions(BaseModel):
    """Search for sessions."""

    session_id: Name | None = None
    project_ids: list[Name] | None = Field(default=None, max_length=100)
    user_metadata: dict[Name, Name] = Field(default={}, max_length=20)
    display_name: Name | None = Field(default=None, min_length=1)
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = Field(default=None, max_length=20)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
