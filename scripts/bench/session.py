"""The session core against what one would do without it, side by side in the same minute.

    python scripts/bench/session.py [sft] [chat] [sample] [overhead] [--rounds N] [--small]

Each part takes turns with its baseline, round by round, so that both meet the same machine,
and prints the ratio of the medians:

    sft       training on full rows through the SDK, against a bare PEFT loop in fp32
    chat      the same on long prompts of uneven lengths with weights on the answers alone
    sample    64 samples under way at once, against transformers.generate on the same batch
    overhead  a small operation through the SDK, against the same on a server that does nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from bench_server import idle_server, slipway_server, write_small_model
from peft import LoraConfig, get_peft_model
from tinker import types
from transformers import AutoModelForCausalLM

from merge import resolve_base
from slipway.settings import Settings

PARTS = ("sft", "chat", "sample", "overhead")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16
SAMPLES, NEW_TOKENS = 64, 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """One example: tokens int64 [n + 1], and weights float32 [n] of their successors."""

    tokens: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]

    def datum(self) -> types.Datum:
        """As the SDK sends it."""
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": self.tokens[1:], "weights": self.weights},
        )


def full_rows(generator: np.random.Generator, vocabulary: int) -> list[Row]:
    """Eight rows of 128 tokens, all of which are trained on."""
    return [
        Row(tokens=generator.integers(3, vocabulary, 129), weights=np.ones(128, np.float32))
        for _ in range(8)
    ]


def chat_rows(generator: np.random.Generator, vocabulary: int) -> list[Row]:
    """Eight rows: prompts of 60 to 600 tokens, of uneven lengths, and answers of 10 to 60."""
    rows = []
    for _ in range(8):
        prompt = int(np.clip(generator.lognormal(5.2, 0.7), 60, 600))
        answer = int(generator.integers(10, 61))
        weights = np.zeros(prompt + answer - 1, np.float32)
        weights[prompt - 1 :] = 1.0
        tokens = generator.integers(3, vocabulary, prompt + answer)
        rows.append(Row(tokens=tokens, weights=weights))
    return rows


class BareLoop:
    """The loop a person would write with PEFT: one padded batch, the model's own logits."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=32, lora_dropout=0.0, target_modules=LAYERS)
        self.model = get_peft_model(model, config)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rows: list[Row]) -> float:
        """Forward, backward and a step; the loss."""
        longest = max(len(row.weights) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask, targets = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for index, row in enumerate(rows):
            length = len(row.weights)
            tokens[index, :length] = torch.from_numpy(row.tokens[:-1])
            mask[index, :length] = 1
            wanted = np.where(row.weights > 0, row.tokens[1:], -100)
            targets[index, :length] = torch.from_numpy(wanted)
        logits = self.model(input_ids=tokens, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        return float(loss)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def take_turns(
    first: Callable[[int], Any], second: Callable[[int], Any], *, rounds: int
) -> tuple[float, float]:
    """Median seconds of each, after a round that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for work, seconds in zip((first, second), times, strict=True):
            seconds.append(timed(lambda work=work, number=number: work(number)))
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def rates(tokens: float, ours: float, theirs: float, *, baseline: str) -> dict[str, Any]:
    """Tokens a second of both, from their seconds, and the ratio."""
    return {
        "ours": f"{tokens / ours:.0f} tokens/s",
        "baseline": f"{tokens / theirs:.0f} tokens/s ({baseline})",
        "ratio": theirs / ours,
    }


def bench_training(
    service: tinker.ServiceClient, name: str, folder: Path, make: Any, *, rounds: int
) -> dict[str, Any]:
    """Tokens a second of the SDK over those of the bare loop. Higher is better."""
    bare = BareLoop(folder)
    vocabulary = bare.model.config.vocab_size
    generator = np.random.default_rng(0)
    batches = [make(generator, vocabulary) for _ in range(rounds + 1)]
    client = service.create_lora_training_client(
        base_model=name, rank=RANK, seed=0, train_unembed=False
    ).result()

    def through_the_sdk(number: int) -> None:
        backward = client.forward_backward([r.datum() for r in batches[number]], "cross_entropy")
        update = client.optim_step(types.AdamParams(learning_rate=1e-4))
        backward.result()
        update.result()

    ours, theirs = take_turns(
        through_the_sdk, lambda number: bare.step(batches[number]), rounds=rounds
    )
    tokens = statistics.median(sum(len(row.weights) for row in batch) for batch in batches[1:])
    return rates(tokens, ours, theirs, baseline="bare PEFT loop")


def bench_sampling(
    service: tinker.ServiceClient, name: str, folder: Path, *, rounds: int
) -> dict[str, Any]:
    """Tokens a second of 64 samples at once over those of generate. Higher is better."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(3, model.config.vocab_size, generator.integers(20, 61))
        for _ in range(SAMPLES)
    ]
    longest = max(map(len, prompts))
    tokens = torch.zeros(SAMPLES, longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, prompt in enumerate(prompts):
        tokens[index, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[index, longest - len(prompt) :] = 1
    client = service.create_sampling_client(base_model=name).result()

    def through_the_sdk(number: int) -> None:
        params = types.SamplingParams(
            max_tokens=NEW_TOKENS, temperature=1.0, seed=number, stop=["\0never\0"]
        )
        waiting = [
            client.sample(types.ModelInput.from_ints(prompt.tolist()), 1, params)
            for prompt in prompts
        ]
        made = sum(len(future.result().sequences[0].tokens) for future in waiting)
        assert made == SAMPLES * NEW_TOKENS

    def generate(number: int) -> None:
        torch.manual_seed(number)
        with torch.inference_mode():
            made = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
        assert made.shape == (SAMPLES, longest + NEW_TOKENS)

    ours, theirs = take_turns(through_the_sdk, generate, rounds=rounds)
    return rates(SAMPLES * NEW_TOKENS, ours, theirs, baseline="transformers.generate")


def bench_overhead(
    service: tinker.ServiceClient, name: str, idle_url: str, *, rounds: int
) -> dict[str, Any]:
    """How much longer a small forward pass takes than none at all. Lower is better."""
    idle = tinker.ServiceClient(base_url=idle_url, api_key="tml-idle")
    clients = [
        where.create_lora_training_client(base_model=name, rank=RANK, seed=0).result()
        for where in (service, idle)
    ]
    row = Row(tokens=np.arange(5, 14), weights=np.ones(8, np.float32))

    def forward(client: tinker.TrainingClient) -> None:
        client.forward([row.datum()], "cross_entropy").result()

    ours, theirs = take_turns(
        lambda _: forward(clients[0]), lambda _: forward(clients[1]), rounds=50 * rounds
    )
    return {
        "ours": f"{1000 * ours:.1f} ms",
        "baseline": f"{1000 * theirs:.1f} ms (a server that does nothing)",
        "ratio": ours / theirs,
        "more": f"{1000 * (ours - theirs):.1f} ms",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="on a model of random weights")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: expected {', '.join(PARTS)}")
    os.environ["TINKER_TELEMETRY"] = "0"
    settings = Settings.read()
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as scratch:
        real = resolve_base(settings.base_model, settings.cache.expanduser())
        small = write_small_model(Path(scratch) / "small", tokenizer_of=real)
        groups = [
            (small if options.small else real, [part for part in parts if part != "overhead"]),
            # The engine's own arithmetic is no overhead.
            (small, [part for part in parts if part == "overhead"]),
        ]
        for number, (folder, chosen) in enumerate(groups):
            if chosen:
                place = Path(scratch) / str(number)
                place.mkdir()
                run_parts(chosen, folder, place, rounds=options.rounds)
    return 0


def run_parts(parts: list[str], folder: Path, scratch: Path, *, rounds: int) -> None:
    """Measure on a server with this base model, and print a line a part."""
    with slipway_server(scratch, base=folder, environment=dict(os.environ)) as environment:
        service = tinker.ServiceClient(
            base_url=environment["TINKER_BASE_URL"], api_key=environment["TINKER_API_KEY"]
        )
        rest = tinker.RestClient(
            base_url=environment["TINKER_BASE_URL"], api_key=environment["TINKER_API_KEY"]
        )
        (model,) = rest.get_server_capabilities().result().supported_models
        name = str(model.model_name)
        for part in parts:
            if part == "sample":
                result = bench_sampling(service, name, folder, rounds=rounds)
            elif part == "overhead":
                with idle_server(scratch, environment=dict(os.environ)) as url:
                    result = bench_overhead(service, name, url, rounds=rounds)
            else:
                make = full_rows if part == "sft" else chat_rows
                result = bench_training(service, name, folder, make, rounds=rounds)
            print(json.dumps({"part": part, **result}), flush=True)
        service.close("success")


if __name__ == "__main__":
    raise SystemExit(main())
