"""The merge against PEFT's own, over architectures, ranks, types and layouts."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from merge.apply import apply, shard_size
from merge.blocks import RawFile
from merge.plan import make_plan
from registry import InvalidInput, hash_file

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "gpt2"]


def merge(base: Path, adapter: Path, output: Path, dtype: str | None = None, **options: Any) -> Any:
    return apply(make_plan(base, adapter, dtype=dtype), output, **options)


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal in float32 but for the order of a sum of `rank` products."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2e-6, atol=2e-6, msg=name)


def saved_names(model: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> Any:
    """PEFT's state without a tied head, which files do not hold."""
    return {name: tensor for name, tensor in model.items() if name in base}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_result_is_what_peft_merges(architecture, bases, tiny, tmp_path, output):
    base = bases(architecture)
    adapter = tiny.adapter(tmp_path / "adapter", base, lora_alpha=7)
    reports = merge(base, adapter, output)
    before, after = tiny.read(base), tiny.read(output)
    assert_close(after, saved_names(tiny.merge(base, adapter), before))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {report.name for report in reports}
    assert len(changed) >= 6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_result_loads_and_answers_as_the_adapter_does(
    architecture, tied, bases, tiny, tmp_path, output
):
    base = bases(architecture, tied=tied)
    adapter = tiny.adapter(tmp_path / "adapter", base)
    merge(base, adapter, output)
    tokens = torch.arange(3, 40)[None]
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        bare = model(tokens).logits
        adapted = PeftModel.from_pretrained(model, adapter).eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(output)(tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)
    assert (bare - adapted).abs().max() > 0.1


PATTERNS = st.dictionaries(
    st.sampled_from(
        ["q_proj", "layers.1.self_attn.v_proj", r"layers\.0\.mlp\..*", "^model.*k_proj"]
    ),
    st.integers(1, 9),
    max_size=3,
)


@given(
    rank=st.integers(1, 9),
    alpha=st.integers(1, 64),
    rslora=st.booleans(),
    ranks=PATTERNS,
    alphas=PATTERNS,
    targets=st.lists(
        st.sampled_from(["q_proj", "k_proj", "v_proj", "down_proj", "gate_proj", "lm_head"]),
        min_size=1,
        unique=True,
    ),
    block=st.integers(1, 4000),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_any_rank_alpha_and_pattern(
    rank, alpha, rslora, ranks, alphas, targets, block, seed, bases, tiny
):
    base = bases()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output"
        output.mkdir()
        adapter = tiny.adapter(
            Path(scratch) / "adapter",
            base,
            seed=seed,
            r=rank,
            lora_alpha=alpha,
            use_rslora=rslora,
            # PEFT warns of a pattern that no target meets.
            rank_pattern={key: value for key, value in ranks.items() if key in targets},
            alpha_pattern={key: value for key, value in alphas.items() if key in targets},
            target_modules=targets,
        )
        merge(base, adapter, output, block_bytes=block)
        found, wanted = tiny.read(output), tiny.merge(base, adapter)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            scale = max(1.0, float(wanted[name].abs().max()))
            assert (tensor - wanted[name]).abs().max() <= 4e-6 * scale


def test_swapped_layers_would_be_noticed(bases, tiny, tmp_path, output):
    base = bases()
    adapter = tiny.adapter(tmp_path / "adapter", base)
    wanted = tiny.merge(base, adapter)

    def swap(tensors):
        for name in [name for name in tensors if ".layers.0." in name]:
            other = name.replace(".layers.0.", ".layers.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    tiny.edit_tensors(adapter / "adapter_model.safetensors", swap)
    merge(base, adapter, output)
    with pytest.raises(AssertionError):
        assert_close(tiny.read(output), wanted)


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gpt2"])
def test_a_tied_head_is_untied_and_the_embedding_left_alone(
    architecture, bases, tiny, tmp_path, output
):
    base = bases(architecture, tied=True)
    adapter = tiny.adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    merge(base, adapter, output)
    before, after = tiny.read(base), tiny.read(output)
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    wanted = tiny.merge(base, adapter)
    torch.testing.assert_close(after["lm_head.weight"], wanted["lm_head.weight"])
    config = json.loads((output / "config.json").read_text())
    assert config.pop("tie_word_embeddings") is False
    original = json.loads((base / "config.json").read_text())
    assert original.pop("tie_word_embeddings") is True
    assert config == original
    model = AutoModelForCausalLM.from_pretrained(output)
    assert torch.equal(model.lm_head.weight, after["lm_head.weight"])


def test_a_tied_head_without_a_lora_stays_tied(bases, tiny, tmp_path, output):
    base = bases(tied=True)
    merge(base, tiny.adapter(tmp_path / "adapter", base), output)
    assert tiny.read(output).keys() == tiny.read(base).keys()
    assert (output / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_tied_head_that_is_stored_as_well_keeps_its_place(tiny, base, tmp_path, output):
    adapter = tiny.adapter(tmp_path / "head", base, target_modules=["lm_head"])
    tiny.edit_json(base / "config.json", tie_word_embeddings=True)

    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tiny.edit_tensors(base / "model.safetensors", tie)
    tiny.edit_tensors(
        adapter / "adapter_model.safetensors",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "lora" not in name],
    )
    merge(base, adapter, output)
    before, after = tiny.read(base), tiny.read(output)
    assert list(before) == list(after)
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(after["lm_head.weight"], before["lm_head.weight"] + 2 * b @ a)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_sharded_base_keeps_its_files(architecture, bases, tiny, tmp_path, output):
    base = bases(architecture, shard_size="60KB")
    whole = bases(architecture)
    adapter = tiny.adapter(tmp_path / "adapter", base)
    merge(base, adapter, output)
    names = {path.name for path in base.glob("*.safetensors")}
    assert len(names) > 2
    assert {path.name for path in output.glob("*.safetensors")} == names
    index = "model.safetensors.index.json"
    assert (output / index).read_bytes() == (base / index).read_bytes()
    for name in names:
        assert list(load_file(output / name)) == list(load_file(base / name))
    single = tmp_path / "single"
    single.mkdir()
    merge(whole, adapter, single)
    found, wanted = tiny.read(output), tiny.read(single)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_index_of_a_sharded_base_follows_what_changes(bases, tiny, tmp_path, output):
    base = bases(tied=True, shard_size="60KB")
    adapter = tiny.adapter(tmp_path / "adapter", base, target_modules=["lm_head", "q_proj"])
    merge(base, adapter, output, dtype="bfloat16")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors = tiny.read(output)
    assert index["weight_map"].keys() == tensors.keys()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    places = index["weight_map"]
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    AutoModelForCausalLM.from_pretrained(output)


def test_untouched_files_are_linked_where_that_is_allowed(bases, tiny, tmp_path, output):
    base = bases(shard_size="60KB")
    adapter = tiny.adapter(
        tmp_path / "adapter", base, target_modules=["model.layers.1.self_attn.q_proj"]
    )
    merge(base, adapter, output, link=True)
    linked = {p.name for p in output.glob("*.safetensors") if p.samefile(base / p.name)}
    assert linked
    assert linked < {p.name for p in output.glob("*.safetensors")}
    copied = tmp_path / "copied"
    copied.mkdir()
    merge(base, adapter, copied)
    for path in output.iterdir():
        assert path.read_bytes() == (copied / path.name).read_bytes()
        assert not (copied / path.name).samefile(base / path.name)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16", "float16"])
def test_the_sum_is_rounded_once(stored, wanted, bases, tiny, tmp_path, output):
    base = bases(dtype=getattr(torch, stored))
    adapter = tiny.adapter(tmp_path / "adapter", base, lora_alpha=1)
    reports = merge(base, adapter, output, dtype=wanted)
    kind = getattr(torch, wanted or stored)
    after, oracle = tiny.read(output), tiny.merge(base, adapter)
    lora = {report.name for report in reports}
    for name, tensor in after.items():
        assert tensor.dtype == kind
        if name not in lora:
            assert torch.equal(tensor, oracle[name].to(kind))
            continue
        # At a tie of the rounding the order of a sum may show, hence an ulp here and there.
        exact = oracle[name].to(kind)
        differing = (tensor != exact).float().mean()
        assert differing < (0.001 if kind is not torch.float32 else 0.5)
        torch.testing.assert_close(tensor, exact, rtol=torch.finfo(kind).eps * 2, atol=1e-6)
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == (wanted or stored)


def test_tensors_kept_in_another_type_stay_so(tiny, base, adapter, output):
    def widen(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()

    tiny.edit_tensors(base / "model.safetensors", widen)
    merge(base, adapter, output, dtype="float16")
    kinds = {name: tensor.dtype for name, tensor in tiny.read(output).items()}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {torch.float16}


def test_bases_stored_without_the_outer_name(bases, tiny, tmp_path, output):
    base = Path(shutil.copytree(bases("gpt2", tied=True), tmp_path / "base"))
    adapter = tiny.adapter(tmp_path / "adapter", base)
    merge(base, adapter, output)
    wanted = tiny.read(output)
    path = base / "model.safetensors"
    save_file(
        {name.removeprefix("transformer."): t for name, t in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    merge(base, adapter, bare)
    found = tiny.read(bare)
    assert {f"transformer.{name}" for name in found} == wanted.keys()
    assert all(torch.equal(found[name], wanted[f"transformer.{name}"]) for name in found)


def folder_digest(folder: Path) -> str:
    lines = [f"{hash_file(path)} {path.name}\n" for path in sorted(folder.iterdir())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_number_of_threads_changes_no_byte(dtype, bases, tiny, tmp_path):
    base = bases()
    adapter = tiny.adapter(tmp_path / "adapter", base, r=9)
    digests, before = set(), torch.get_num_threads()
    try:
        for workers, threads in ((1, 1), (2, 1), (5, 4), (5, 4)):
            torch.set_num_threads(threads)
            output = tmp_path / f"{len(digests)}-{workers}-{threads}"
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            merge(base, adapter, output, dtype=dtype, workers=workers, block_bytes=2000)
            assert torch.get_num_threads() == threads
            digests.add(folder_digest(output))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    """Weights whose products and sums are exact in float32, whoever adds them up."""
    for index, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        numbers = torch.arange(tensor.numel(), dtype=torch.int64) * 7919 + index * 104729
        tensors[name] = ((numbers % 17) - 8).reshape(tensor.shape).float()


GOLDEN = {
    "float32": "a4c931467f903084f7f18f7b79db396f63b58cb1ca27a601beff3b0ad1fc36e7",
    "bfloat16": "a866943bb1a86d0eb0edd8957fcaae57279f3420aa94f3c878bc4553993ce470",
}


@pytest.mark.parametrize("dtype", GOLDEN)
def test_golden_bytes(dtype, tiny, base, adapter, output):
    tiny.edit_tensors(base / "model.safetensors", whole_numbers)
    tiny.edit_tensors(adapter / "adapter_model.safetensors", whole_numbers)
    tiny.edit_json(adapter / "adapter_config.json", r=4, lora_alpha=8)
    merge(base, adapter, output, dtype=dtype)
    after, oracle = tiny.read(output), tiny.merge(base, adapter)
    assert all(torch.equal(after[name], oracle[name].to(after[name].dtype)) for name in oracle)
    assert hash_file(output / "model.safetensors") == GOLDEN[dtype]


def test_files_beside_the_weights_are_kept_byte_for_byte(tiny, base, adapter, output):
    (base / "README.md").write_text("no part of the model")
    (base / "modeling_tiny.py").write_text("raise SystemExit")
    (base / "generation_config.json").write_text('{ "eos_token_id":   2 }')
    (adapter / "probe.json").write_text("{}")
    (adapter / "training-data.json").write_text('{"format": 1}')
    (adapter / "chat_template.jinja").write_text("the adapter's own")
    (adapter / "optimizer.safetensors").write_text("not to be carried on")
    merge(base, adapter, output)
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "probe.json",
        "training-data.json",
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (output / name).read_bytes() == (base / name).read_bytes()
    for name in ("probe.json", "training-data.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (adapter / name).read_bytes()


def test_what_names_code_is_dropped(tiny, base, adapter, output):
    tiny.edit_json(base / "config.json", auto_map={"AutoConfig": "code.Config"})
    merge(base, adapter, output)
    assert "auto_map" not in json.loads((output / "config.json").read_text())


def zero_b(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "q_proj.lora_B" in name:
            tensors[name].zero_()


def test_a_lora_that_changes_nothing_fails(tiny, base, adapter, output):
    tiny.edit_tensors(adapter / "adapter_model.safetensors", zero_b)
    with pytest.raises(InvalidInput, match=r"q_proj\.weight changes nothing: its B"):
        merge(base, adapter, output)


def test_a_lora_lost_to_rounding_fails(tiny, base, adapter, output):
    def shrink(tensors):
        for name in tensors:
            tensors[name] *= 1e-8

    tiny.edit_tensors(adapter / "adapter_model.safetensors", shrink)
    with pytest.raises(InvalidInput, match="lost to rounding to BF16"):
        merge(base, adapter, output, dtype="bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value, tiny, base, adapter, output, tmp_path):
    clean, weights = load_file(base / "model.safetensors"), base / "model.safetensors"

    def spoil(tensors):
        name = sorted(name for name in tensors if "up_proj" in name)[0]
        tensors[name][1, 2] = value

    tiny.edit_tensors(weights, spoil)
    with pytest.raises(InvalidInput, match=r"base's tensor model.layers.0.mlp.up_proj.*NaN"):
        merge(base, adapter, output)
    save_file(clean, weights, metadata={"format": "pt"})
    tiny.edit_tensors(adapter / "adapter_model.safetensors", spoil)
    shutil.rmtree(output)
    output.mkdir()
    with pytest.raises(InvalidInput, match=r"adapter's tensor .*up_proj.lora_A.weight holds NaN"):
        merge(base, adapter, output)


def test_an_overflow_of_the_type_is_refused(tiny, base, adapter, output):
    def grow(tensors):
        for name in tensors:
            tensors[name] *= 1e4

    tiny.edit_tensors(adapter / "adapter_model.safetensors", grow)
    with pytest.raises(InvalidInput, match="gives NaN or infinite values as F16"):
        merge(base, adapter, output, dtype="float16")


def test_base_weights_that_came_with_the_adapter_must_be_the_bases(bases, tiny, tmp_path, output):
    base = bases(tied=True)
    adapter = tiny.adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    weights = adapter / "adapter_model.safetensors"
    copied = [name for name in load_file(weights) if "lora" not in name]
    assert copied, "PEFT no longer saves the embedding beside a LoRA on it"

    def train(tensors):
        tensors[copied[0]][0, 0] += 1

    tiny.edit_tensors(weights, train)
    with pytest.raises(InvalidInput, match="it is not the base's"):
        merge(base, adapter, output)


def test_progress_counts_every_byte_once(bases, tiny, tmp_path, output):
    base = bases(shard_size="60KB")
    adapter = tiny.adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    seen: list[tuple[int, int, str]] = []
    merge(base, adapter, output, progress=lambda *args: seen.append(args))
    total = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert seen[-1][:2] == (total, total)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    plan = make_plan(base, adapter)
    assert sum(map(shard_size, plan.shards)) == total


class FullDisk(RawFile):
    """Has no room left after some writes."""

    room = 3

    def write(self, start: int, data: memoryview) -> None:
        if FullDisk.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        FullDisk.room -= 1
        super().write(start, data)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_full_disk_is_an_error_and_no_hang(room, bases, shared_adapter, output):
    FullDisk.room = room
    with pytest.raises(OSError, match="No space left"):
        merge(bases(), shared_adapter, output, raw_file=FullDisk)


def test_memory_is_bounded_by_blocks_not_by_tensors(tiny, tmp_path, output):
    # 32 MB of weights, of which one tensor is 16 MB; numpy and torch buffers are not traced by
    # Python, so what is measured is the size of every single read.
    base = tiny.base(tmp_path / "base")
    adapter = tiny.adapter(tmp_path / "adapter", base)
    largest = 0

    class Watched(RawFile):
        def read(self, start: int, buffer: memoryview) -> None:
            nonlocal largest
            largest = max(largest, len(buffer))
            super().read(start, buffer)

        def write(self, start: int, data: memoryview) -> None:
            nonlocal largest
            largest = max(largest, len(data))
            super().write(start, data)

    tracemalloc.start()
    merge(base, adapter, output, dtype="bfloat16", block_bytes=1000, raw_file=Watched)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The header is written in one piece, and is larger than a block here.
    assert largest < 10_000
    assert peak < 4_000_000


def test_rows_wider_than_a_block_are_taken_one_by_one(bases, shared_adapter, tiny, output):
    merge(bases(), shared_adapter, output, block_bytes=1)
    assert_close(tiny.read(output), tiny.merge(bases(), shared_adapter))
