"""Executes the operations of many runs on one base model.

The engine is plain and synchronous: one thread calls it, one operation at a time, and what
an operation does is a function of the run's state and the operation alone. A run that is
restored from a snapshot and given the same operations again ends with the same bits, on CPU
in fp32 with the same number of threads. An operation that fails leaves its run as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from registry.errors import InvalidInput, NotFound
from registry.files import Files
from session_core import operations as op
from session_core import snapshots, training_data
from session_core.datums import Datums, read_datums
from session_core.hints import LORAPLUS_KEY, check_lr_ratio
from session_core.lora import Adapters, LoraSpec, check_tensors
from session_core.losses import loss_named
from session_core.model import Base
from session_core.operations import Operation, Result
from session_core.optimizer import Adam, AdamParams, global_norm
from session_core.passes import prompt_logprobs, train_pass
from session_core.probe import dump_probe, probe_prompts


@dataclass(kw_only=True)
class Run:
    """A training run in memory: its adapter is in `slot`, the rest is here."""

    slot: str
    spec: LoraSpec
    optimizer: Adam
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens_trained: int = 0
    last_loss: float | None = None
    adam: AdamParams | None = None
    data: training_data.TrainingData = field(default_factory=training_data.TrainingData)

    def trainer_state(self) -> snapshots.TrainerState:
        """What trainer_state.json says of the run."""
        return snapshots.TrainerState(
            step=self.optimizer.steps,
            seed=self.spec.seed,
            tokens_trained=self.tokens_trained,
            last_loss=self.last_loss,
            adam=self.adam.describe() if self.adam else None,
            loraplus_lr_ratio=self.optimizer.lr_ratio,
        )

    def describe(self) -> dict[str, Any]:
        """What results say of the run."""
        return {
            **self.spec.describe(),
            LORAPLUS_KEY: self.optimizer.lr_ratio,
            "step": self.optimizer.steps,
            "tokens_trained": self.tokens_trained,
            "last_loss": self.last_loss,
        }


class Engine:
    """One base model and the runs and samplers on it."""

    def __init__(self, base: Base, *, files: Files | None = None) -> None:
        self.base = base
        self._files = files or Files()
        self.progress: Callable[[], None] = lambda: None
        """Called as an operation gets on, at least once a micro-batch."""
        self.adapters = Adapters(base.model)
        self._runs: dict[str, Run] = {}
        self._samplers: dict[str, str | None] = {}
        self._slots = 0
        special = frozenset(int(token) for token in base.tokenizer.all_special_ids)
        known = min(base.vocabulary, len(base.tokenizer))
        self._probe_prompts = probe_prompts(known, special)
        self._probe_base: list[list[float]] | None = None
        self._handlers: dict[str, Callable[[str, Operation], Result]] = {
            op.CREATE_RUN: self._create_run,
            op.LOAD_RUN: self._load_run,
            op.FORWARD: self._forward,
            op.FORWARD_BACKWARD: self._forward_backward,
            op.OPTIM_STEP: self._optim_step,
            op.SAVE_CHECKPOINT: self._save_checkpoint,
            op.SAVE_WEIGHTS: self._save_weights,
            op.SNAPSHOT: self._snapshot,
            op.RESTORE: self._restore,
            op.UNLOAD_RUN: self._unload_run,
            op.LOAD_SAMPLER: self._load_sampler,
            op.UNLOAD_SAMPLER: self._unload_sampler,
        }

    def execute(self, run_id: str, operation: Operation) -> Result:
        """Do an operation of a run (`run_id` is not looked at by sampler operations).

        Raises a SlipwayError for what the client got wrong; the run is as before then.
        """
        handler = self._handlers.get(operation.kind)
        if handler is None:
            raise InvalidInput(f"Unknown operation {operation.kind!r}.")
        return handler(run_id, operation)

    def sampler_slot(self, sampler_id: str) -> str | None:
        """The adapter slot of a loaded sampler, None for the base. Raises NotFound."""
        if sampler_id not in self._samplers:
            raise NotFound(f"Sampler {sampler_id} is not loaded.")
        return self._samplers[sampler_id]

    # Runs come and go.

    def _create_run(self, run_id: str, operation: Operation) -> Result:
        if run_id in self._runs:
            raise InvalidInput(f"Run {run_id} exists already.")
        params = {key: value for key, value in operation.params.items() if value is not None}
        lr_ratio = check_lr_ratio(params.pop(LORAPLUS_KEY, 1.0))
        unknown = sorted(set(params) - {*LoraSpec.__dataclass_fields__})
        if unknown or "rank" not in params:
            raise InvalidInput(f"create_run needs a rank, and knows no {unknown or 'more'}.")
        spec = LoraSpec(**params)
        slot = self._new_slot()
        self.adapters.add(slot, spec)
        self._runs[run_id] = self._new_run(slot, spec, lr_ratio)
        return Result(params=self._runs[run_id].describe())

    def _load_run(self, run_id: str, operation: Operation) -> Result:
        params = operation.params
        saved = snapshots.read_state(Path(params["folder"]))
        with_optimizer = bool(params.get("optimizer", False))
        if with_optimizer and saved.optimizer is None:
            raise InvalidInput(
                "This version holds no optimizer state (it was saved for sampling): load it "
                "without the optimizer, or name a checkpoint saved with save_state."
            )
        if not with_optimizer:
            state = snapshots.TrainerState(
                seed=saved.state.seed, loraplus_lr_ratio=saved.state.loraplus_lr_ratio
            )
            saved = replace(saved, optimizer=None, state=state)
        if params.get(LORAPLUS_KEY) is not None:
            # Asked for by the run that loads; otherwise what was saved decides.
            lr_ratio = check_lr_ratio(params[LORAPLUS_KEY])
            saved = replace(saved, state=replace(saved.state, loraplus_lr_ratio=lr_ratio))
        run = self._read_run(replace(saved, gradients=None), expected=params)
        self._replace_run(run_id, run)
        return Result(params=run.describe())

    def _restore(self, run_id: str, operation: Operation) -> Result:
        run = self._read_run(snapshots.read_state(Path(operation.params["folder"])))
        self._replace_run(run_id, run)
        return Result(params=run.describe())

    def _read_run(self, saved: snapshots.Saved, expected: Mapping[str, Any] | None = None) -> Run:
        spec = self.adapters.spec_of(saved.config, saved.adapter)
        spec = replace(spec, seed=saved.state.seed)
        for name, found in spec.describe().items():
            wanted = (expected or {}).get(name)
            if name != "seed" and wanted is not None and wanted != found:
                raise InvalidInput(
                    f"The version was trained with {name} {found}, the run asks for {wanted}."
                )
        slot = self._new_slot()
        self.adapters.load(slot, spec, saved.adapter)
        try:
            run = self._new_run(slot, spec, saved.state.loraplus_lr_ratio)
            if saved.optimizer is not None:
                run.optimizer.load(saved.optimizer, saved.state.step)
            if saved.gradients is not None:
                check_tensors(
                    {name: self.adapters.parameters(slot)[name] for name in saved.gradients},
                    saved.gradients,
                )
                run.gradients = {
                    name: tensor.to(self.base.device) for name, tensor in saved.gradients.items()
                }
            if saved.training_data is not None:
                run.data = training_data.load(saved.training_data)
            run.tokens_trained = saved.state.tokens_trained
            run.last_loss = saved.state.last_loss
            run.adam = AdamParams(**saved.state.adam) if saved.state.adam else None
        except BaseException:
            self.adapters.remove(slot)
            raise
        return run

    def _replace_run(self, run_id: str, run: Run) -> None:
        before = self._runs.get(run_id)
        self._runs[run_id] = run
        if before is not None:
            self.adapters.remove(before.slot)

    def _unload_run(self, run_id: str, operation: Operation) -> Result:
        del operation
        run = self._runs.pop(run_id, None)
        if run is not None:
            self.adapters.remove(run.slot)
        return Result()

    def _new_run(self, slot: str, spec: LoraSpec, lr_ratio: float) -> Run:
        optimizer = Adam(self.adapters.parameters(slot), lr_ratio=lr_ratio)
        return Run(slot=slot, spec=spec, optimizer=optimizer)

    def _new_slot(self) -> str:
        self._slots += 1
        return f"slot{self._slots}"

    def _run(self, run_id: str) -> Run:
        if run_id not in self._runs:
            raise NotFound(f"Run {run_id} is not loaded.")
        return self._runs[run_id]

    # Training.

    def _forward(self, run_id: str, operation: Operation) -> Result:
        return self._pass(self._run(run_id), operation, backward=False)

    def _forward_backward(self, run_id: str, operation: Operation) -> Result:
        return self._pass(self._run(run_id), operation, backward=True)

    def _pass(self, run: Run, operation: Operation, *, backward: bool) -> Result:
        loss = loss_named(operation.params.get("loss_fn"))
        config = loss.configure(operation.params.get("loss_fn_config") or {})
        datums = read_datums(
            operation,
            required=loss.required,
            optional=loss.optional,
            vocabulary=self.base.vocabulary,
            context=self.base.context,
        )
        parameters = self.adapters.parameters(run.slot)
        try:
            logprobs, total = train_pass(
                self.base,
                self.adapters,
                run.slot,
                datums,
                loss,
                config,
                backward=backward,
                progress=self.progress,
            )
            if backward:
                # All that can fail comes before the first change of the run.
                texts = self._texts(datums)
                run.gradients = _sum(run.gradients, parameters)
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        if backward:
            weighted = _weighted_tokens(datums)
            run.last_loss = total / weighted if weighted else None
            run.tokens_trained += datums.token_count
            run.data.add(texts)
        flat, offsets = op.ragged(logprobs)
        return Result(
            params={"metrics": {"loss:sum": total, "tokens:sum": float(datums.token_count)}},
            arrays={"logprobs": flat, "logprobs.offsets": offsets},
        )

    def _optim_step(self, run_id: str, operation: Operation) -> Result:
        run = self._run(run_id)
        params = AdamParams.read(operation.params)
        gradients, run.gradients = run.gradients, {}
        norm = run.optimizer.step(gradients, params)
        run.adam = params
        metrics = {"grad_norm:mean": norm, "learning_rate:mean": params.learning_rate}
        return Result(params={"metrics": metrics, "step": run.optimizer.steps})

    def _texts(self, datums: Datums) -> list[str]:
        """Decoded text of each whole datum: its tokens and the last one's target."""
        texts = []
        for tokens, targets in zip(datums.tokens, datums.targets, strict=True):
            last = targets[-1:].tolist() if targets.ndim == 1 else []
            texts.append(self.base.decode(tokens.tolist() + last))
        return texts

    # Saves.

    def _save_checkpoint(self, run_id: str, operation: Operation) -> Result:
        return self._save(self._run(run_id), operation, optimizer=True)

    def _save_weights(self, run_id: str, operation: Operation) -> Result:
        return self._save(self._run(run_id), operation, optimizer=False)

    def _save(self, run: Run, operation: Operation, *, optimizer: bool) -> Result:
        extra: dict[str, bytes] = {}
        if operation.params.get("evidence", True):
            extra[snapshots.TRAINING_DATA] = run.data.dump()
            extra[snapshots.PROBE] = self._probe(run.slot)
        snapshots.write_state(
            Path(operation.params["folder"]),
            config=self._adapter_config(run, operation.params.get("base_model")),
            adapter=self.adapters.parameters(run.slot),
            state=run.trainer_state(),
            optimizer=run.optimizer.tensors() if optimizer else None,
            extra=extra,
            files=self._files,
        )
        return Result(params=run.describe())

    def _snapshot(self, run_id: str, operation: Operation) -> Result:
        run = self._run(run_id)
        snapshots.write_state(
            Path(operation.params["folder"]),
            config=self._adapter_config(run, None),
            adapter=self.adapters.parameters(run.slot),
            state=run.trainer_state(),
            optimizer=run.optimizer.tensors(),
            gradients=run.gradients or None,
            extra={snapshots.TRAINING_DATA: run.data.dump()},
            files=self._files,
        )
        return Result(params=run.describe())

    def _adapter_config(self, run: Run, base_model: str | None) -> dict[str, Any]:
        # What is null says nothing, and older readers may not know its name.
        full = self.adapters.config(run.spec).to_dict()
        config = {key: value for key, value in full.items() if value is not None}
        config["base_model_name_or_path"] = base_model
        config["inference_mode"] = True
        config["target_modules"] = sorted(config["target_modules"])
        for key, value in config.items():
            # PEFT turns enumerations into strings only as it writes.
            config[key] = getattr(value, "value", value)
        return config

    def _probe(self, slot: str) -> bytes:
        if self._probe_base is None:
            self._probe_base = self._probe_scores(None)
        return dump_probe(
            self._probe_prompts, base=self._probe_base, adapter=self._probe_scores(slot)
        )

    def _probe_scores(self, slot: str | None) -> list[list[float]]:
        rows = [np.array(prompt, np.int64) for prompt in self._probe_prompts]
        return [
            scores[1:].tolist() for scores in prompt_logprobs(self.base, self.adapters, slot, rows)
        ]

    # Sampling.

    def _load_sampler(self, run_id: str, operation: Operation) -> Result:
        del run_id
        sampler_id, folder = operation.params["sampler_id"], operation.params.get("folder")
        if sampler_id in self._samplers:
            return Result()
        slot = None
        if folder is not None:
            saved = snapshots.read_state(Path(folder))
            spec = self.adapters.spec_of(saved.config, saved.adapter)
            slot = self._new_slot()
            self.adapters.load(slot, spec, saved.adapter)
        self._samplers[sampler_id] = slot
        return Result()

    def _unload_sampler(self, run_id: str, operation: Operation) -> Result:
        del run_id
        slot = self._samplers.pop(operation.params["sampler_id"], None)
        if slot is not None:
            self.adapters.remove(slot)
        return Result()


def _sum(
    gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Gradients with those of the last pass. Raises: InvalidInput: if the sum is not finite."""
    summed = dict(gradients)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            summed[name] = summed[name] + parameter.grad if name in summed else parameter.grad
    # A sum of squares that overflows could not be clipped, nor stepped with.
    if not math.isfinite(global_norm(summed)):
        raise InvalidInput(
            "The gradient is not finite: the batch's weights, advantages or ratios are too "
            "large. No gradient was added."
        )
    return summed


def _weighted_tokens(datums: Datums) -> int:
    gate = datums.inputs.get("weights", datums.inputs.get("advantages", []))
    return sum(int((row != 0).reshape(len(row), -1).any(axis=1).sum()) for row in gate)
