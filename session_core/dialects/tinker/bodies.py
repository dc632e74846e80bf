"""JSON bodies of the SDK's requests. Unknown fields are ignored: the SDK may grow."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from registry import InvalidInput

# A name, an id: longer ones are nobody's.
LONGEST = 512


class CreateSession(BaseModel):
    """Open a session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str | None = Field(default=None, max_length=LONGEST)
    display_name: str | None = Field(default=None, max_length=LONGEST)


class SessionRef(BaseModel):
    """A body that names a session."""

    session_id: str = Field(max_length=LONGEST)


class LoraConfig(BaseModel):
    """What of the model gets a LoRA, and how large it is."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BaseModel):
    """Which optimizer a run has; AdamW is the one there is."""

    type: str = "adamw"


class CreateModel(BaseModel):
    """Create a run."""

    session_id: str = Field(max_length=LONGEST)
    model_seq_id: int = Field(ge=0, le=2**31 - 1)
    base_model: str = Field(max_length=LONGEST)
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None


class ModelRef(BaseModel):
    """A body that names a run."""

    model_id: str = Field(max_length=LONGEST)


class OptimStep(BaseModel):
    """One step of the optimizer; its parameters are checked where they are used."""

    model_id: str = Field(max_length=LONGEST)
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

    model_id: str = Field(max_length=LONGEST)
    seq_id: int | None = None
    path: str | None = Field(default=None, max_length=LONGEST)
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(BaseModel):
    """Save weights to sample from: named ones, or a snapshot for a sampler."""

    model_id: str = Field(max_length=LONGEST)
    seq_id: int | None = None
    path: str | None = Field(default=None, max_length=LONGEST)
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    user_metadata: dict[str, Any] | None = None


class LoadWeights(BaseModel):
    """Load what was saved, into a run that exists or a new one."""

    path: str = Field(max_length=LONGEST)
    optimizer: bool
    model_id: str | None = Field(default=None, max_length=LONGEST)
    seq_id: int | None = None
    session_id: str | None = Field(default=None, max_length=LONGEST)
    model_seq_id: int | None = Field(default=None, ge=0, le=2**31 - 1)
    base_model: str | None = Field(default=None, max_length=LONGEST)
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(BaseModel):
    """Create a sampler."""

    session_id: str = Field(max_length=LONGEST)
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = Field(default=None, max_length=LONGEST)
    model_path: str | None = Field(default=None, max_length=LONGEST)


class Chunk(BaseModel):
    """A piece of a prompt; only text is served here."""

    type: str = "encoded_text"
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


class Sample(BaseModel):
    """A sampling request."""

    sampling_session_id: str | None = Field(default=None, max_length=LONGEST)
    seq_id: int | None = None
    num_samples: int = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    def check(self) -> None:
        """Raises: InvalidInput: naming what is asked for and not served."""
        wanted = {
            "topk_prompt_logprobs": self.topk_prompt_logprobs,
            "topk_sample_logprobs": self.topk_sample_logprobs,
            "target_prompt_logprobs": self.target_prompt_logprobs,
            "prompt_alt_tokens_k": self.prompt_alt_tokens_k,
            "prompt_logprobs_last_n": self.prompt_logprobs_last_n,
        }
        asked = [name for name, value in wanted.items() if value]
        if asked:
            raise InvalidInput(f"{', '.join(asked)} is not served here yet")
        if self.sampling_session_id is None:
            raise InvalidInput("a sample needs a sampling_session_id: create a sampling client")


class RetrieveFuture(BaseModel):
    """Ask for a result."""

    request_id: str = Field(max_length=LONGEST)
    allow_metadata_only: bool = False


class FinishReason(BaseModel):
    """How a client's session ended."""

    type: Literal["success", "errored", "interrupted"] | str = "success"


class WeightsInfo(BaseModel):
    """Ask what a path holds."""

    tinker_path: str = Field(max_length=LONGEST)
