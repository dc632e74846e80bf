"""The demo's task: sums and differences of two two-digit numbers, from reasoning-gym.

    python scripts/recipes/arithmetic.py suite --train-items 2560 --items 240 --out suite.json

Training and held-out items come from seeds far apart: reasoning-gym seeds item *i* with
``seed + i``, so neighbouring seeds give nearly the same data set. That alone proves nothing,
so every held-out question that occurs among the training items is removed as well, and so is
every sum whose terms were trained on in the other order.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym

TRAIN_SEED = 1_000_000
HELD_OUT_SEED = 900_000_000
NAME = "two-digit-sums"
# SmolLM2's chat format, written out: it is part of what the suite freezes.
TEMPLATE = (
    "<|im_start|>system\nAnswer with the number only.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question and its answer."""

    question: str
    answer: str


def items(*, seed: int, size: int) -> list[Item]:
    """``size`` items of the task, the same for the same seed."""
    data = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=size, min_terms=2, max_terms=2, min_digits=2, max_digits=2
    )
    return [Item(question=entry["question"], answer=str(entry["answer"])) for entry in data]


def same_problem(question: str) -> str:
    """A key under which ``12 + 34`` and ``34 + 12`` are one problem, and ``12 - 34`` another."""
    expression = question.split(":")[-1].removesuffix("=").strip()
    if " + " in expression:
        return " + ".join(sorted(expression.split(" + ")))
    return expression


def training_items(size: int) -> list[Item]:
    """The first ``size`` training items."""
    return items(seed=TRAIN_SEED, size=size)


def held_out_items(size: int, *, train_items: int) -> list[Item]:
    """``size`` distinct items, none of which is among the first ``train_items`` to train on.

    Raises:
        SystemExit: when fewer than ``size`` are left.
    """
    seen = {same_problem(item.question) for item in training_items(train_items)}
    drawn = {same_problem(item.question): item for item in items(seed=HELD_OUT_SEED, size=2 * size)}
    left = [item for problem, item in drawn.items() if problem not in seen]
    if len(left) < size:
        sys.exit(f"only {len(left)} of {size} held-out items are left: train on fewer items")
    return left[:size]


def suite(size: int, *, train_items: int) -> dict[str, object]:
    """The evaluation suite: data, template, decoding and grader, to be frozen under one digest."""
    return {
        "format": 1,
        "name": NAME,
        "template": TEMPLATE,
        # Room for a sentence around the number: the base model answers "The answer is 19.".
        "decoding": {"max_tokens": 48, "temperature": 0.0, "stop": [END]},
        # The last number of the answer, whatever stands around it.
        "grader": {"kind": "numeric"},
        "items": [
            {"id": f"{NAME}-{number:04d}", "question": item.question, "answer": item.answer}
            for number, item in enumerate(held_out_items(size, train_items=train_items))
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["suite"])
    parser.add_argument("--items", type=int, default=240, help="held-out items")
    parser.add_argument("--train-items", type=int, required=True, help="items training will use")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    made = suite(options.items, train_items=options.train_items)
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{options.items} held-out items written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
