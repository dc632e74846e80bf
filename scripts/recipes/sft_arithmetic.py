"""Supervised fine-tuning on two-digit sums, with the official ``tinker`` SDK.

    eval "$(slipway env)"
    python scripts/recipes/sft_arithmetic.py --group arithmetic --log train.jsonl
    python scripts/recipes/sft_arithmetic.py --log train.jsonl --resume tinker://.../step-0040

Nothing in it knows of Slipway beyond the address in the environment. It saves a checkpoint
halfway and at the end. Which items a step sees and its learning rate depend on the step's number
alone, so a resumed run goes on exactly where the checkpoint was taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import tinker
from arithmetic import END, TEMPLATE, Item, training_items
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tinker import types

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def datum(item: Item, tokenizer) -> types.Datum:  # type: ignore[no-untyped-def]
    """Tokens of prompt and answer; only the answer's have weight. Shifted by one, as inputs are."""
    prompt = tokenizer.encode(TEMPLATE.format(question=item.question), add_special_tokens=False)
    answer = tokenizer.encode(item.answer + END, add_special_tokens=False)
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.array(weights, dtype=np.float32),
        },
    )


def mean_loss(output: types.ForwardBackwardOutput, batch: list[types.Datum]) -> float:
    """Cross-entropy per weighted token, in nats."""
    logprobs = np.concatenate([out["logprobs"].to_numpy() for out in output.loss_fn_outputs])
    weights = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in batch])
    return float(-(logprobs * weights).sum() / weights.sum())


def learning_rate(step: int, *, peak: float, steps: int) -> float:
    """Linear warm-up over five steps, then linear decay to zero."""
    return peak * min(1.0, (step + 1) / 5) * (1 - step / steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SFT on two-digit sums over the tinker SDK.")
    parser.add_argument("--base-model", default=BASE_MODEL)
    parser.add_argument("--group", default="arithmetic", help="model package group of the saves")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", metavar="PATH", help="tinker:// path of a saved state")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, one a step and a save")
    return parser.parse_args()


def main() -> int:
    options = parse()
    service = tinker.ServiceClient(user_metadata={"model_package_group": options.group})
    first = 0
    if options.resume:
        client = service.create_training_client_from_state_with_optimizer(options.resume).result()
        first = int(options.resume.rsplit("-", 1)[-1])
    else:
        client = service.create_lora_training_client(
            base_model=options.base_model,
            rank=options.rank,
            seed=options.seed,
            train_unembed=False,
        ).result()
    tokenizer = client.get_tokenizer()
    data = [datum(item, tokenizer) for item in training_items(options.steps * options.batch_size)]
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f} tokens/s"),
        TextColumn("{task.fields[took]:.1f} s a step"),
        TimeRemainingColumn(),
    )
    with options.log.open("a") as log, Progress(*columns) as progress:

        def record(**line: object) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        bar = progress.add_task(
            "", total=options.steps, completed=first, loss=float("nan"), rate=0, took=0
        )
        for step in range(first, options.steps):
            began = time.monotonic()
            batch = data[step * options.batch_size : (step + 1) * options.batch_size]
            rate = learning_rate(step, peak=options.learning_rate, steps=options.steps)
            # Both are submitted before either is awaited: the server never waits for this loop.
            backward = client.forward_backward(batch, "cross_entropy")
            update = client.optim_step(
                types.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0)
            )
            loss = mean_loss(backward.result(), batch)
            update.result()
            took = time.monotonic() - began
            tokens = sum(d.model_input.length for d in batch)
            record(step=step + 1, loss=loss, tokens=tokens, seconds=took, learning_rate=rate)
            progress.update(bar, advance=1, loss=loss, rate=tokens / took, took=took)
            if step + 1 in (options.steps // 2, options.steps):
                saved = client.save_state(f"step-{step + 1:04d}").result()
                record(saved=saved.path, at_step=step + 1)
                progress.console.print(f"Saved {saved.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
