"""Carries out a plan: streams the base through, block by block, into a new folder.

Peak memory is a few blocks of rows and one LoRA, whatever the size of the model. Sums are in
float32 and rounded once, to the type of the result. Blocks have a fixed size and each is
computed by one thread, so the bytes do not depend on how many threads there are.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from merge.blocks import DTYPES, RawFile, read_matrix, read_rows, row_bytes, view
from merge.folder import CONFIG, INDEX, read_json
from merge.headers import TensorEntry, encode_header
from merge.plan import Equality, Plan, ShardPlan, TensorPlan
from merge.report import BlockStats, TensorReport, summed
from registry.errors import InvalidInput

# Bytes of float32 a thread works on at once: what fits a processor's cache is fastest, and a
# few such blocks stay far below the 64 MB that a merge may take.
BLOCK_BYTES = 4 << 20

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class _Adder:
    """One tensor's LoRA in memory: ``delta(rows)`` gives those rows of its update."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the update in float32, in the layout of the base."""
        return (self.left[start:stop] @ self.right).mul_(self.scale)


def apply(
    plan: Plan,
    output: Path,
    *,
    progress: Progress | None = None,
    link: bool = False,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    raw_file: type[RawFile] = RawFile,
) -> list[TensorReport]:
    """Write the merged model into an existing, empty folder.

    Args:
        progress: called with bytes done, bytes of all weight files, and what is being done.
        link: whether untouched weight files may be hard links to the base's, to be used only
            where those never change. Where links cannot be made the file is copied.
        workers: threads; by default as many as processors may be used.
        block_bytes: of float32 a thread works on at once.

    Returns what happened to each merged tensor, in the plan's order.

    Raises:
        InvalidInput: if a value is NaN or infinite, or a LoRA changes nothing.
        OSError: if the disk is full; the folder is then for its owner to drop.
    """
    count = workers or len(os.sched_getaffinity(0))
    total = sum(shard_size(shard) for shard in plan.shards)
    reports: list[TensorReport] = []
    done = 0
    with _one_thread_each(), ThreadPoolExecutor(count, initializer=_one_thread) as pool:
        for equality in plan.equalities:
            _check_equal(plan, equality, block_bytes)
        for shard in plan.shards:

            def moved(size: int, name: str = shard.name) -> None:
                nonlocal done
                done += size
                if progress is not None:
                    progress(done, total, f"writing {name}")

            if shard.untouched:
                copy_file(plan.base / shard.name, output / shard.name, link=link)
                moved(shard_size(shard))
            else:
                reports += _write_shard(plan, shard, output, pool, moved, block_bytes, raw_file)
    _write_index(plan, output)
    _write_copies(plan, output)
    return reports


def shard_size(shard: ShardPlan) -> int:
    """Bytes of a weight file of the result, header and all."""
    return encode_shard(shard)[1]


def encode_shard(shard: ShardPlan) -> tuple[bytes, int, list[TensorEntry]]:
    """A weight file's header, its whole size, and where each tensor goes."""
    tensors = [(t.name, t.dtype, t.source.shape) for t in shard.tensors]
    raw, entries = encode_header(tensors, shard.metadata)
    return raw, entries[-1].end if entries else len(raw), entries


def _write_shard(
    plan: Plan,
    shard: ShardPlan,
    output: Path,
    pool: ThreadPoolExecutor,
    moved: Callable[[int], None],
    block_bytes: int,
    raw_file: type[RawFile],
) -> list[TensorReport]:
    raw, _, entries = encode_shard(shard)
    reports = []
    with ExitStack() as open_files:
        adapter = open_files.enter_context(raw_file(plan.adapter.weights))
        bases = {
            name: open_files.enter_context(raw_file(plan.base / name))
            for name in sorted({tensor.base_file for tensor in shard.tensors})
        }
        target = open_files.enter_context(raw_file(output / shard.name, write=True))
        target.write(0, memoryview(raw))
        moved(len(raw))
        for tensor, entry in zip(shard.tensors, entries, strict=True):
            base = bases[tensor.base_file]
            if tensor.untouched:
                target.copy(base, tensor.source.start, tensor.source.size, entry.start)
            else:
                adder = _adder(adapter, tensor) if tensor.lora is not None else None
                stats = _write_tensor(tensor, entry, base, target, adder, pool, block_bytes)
                if tensor.lora is not None:
                    reports.append(_report(tensor, stats))
            moved(entry.size)
    return reports


def _check_equal(plan: Plan, equality: Equality, block_bytes: int) -> None:
    """Compare a copy in the adapter with the base, as far as the copy's type can tell."""
    copy = _flat(equality.copy)
    source = _flat(equality.source)
    height = max(1, block_bytes // 4)
    with RawFile(plan.adapter.weights) as adapter, RawFile(plan.base / equality.base_file) as base:
        for start in range(0, copy.shape[0], height):
            stop = min(start + height, copy.shape[0])
            ours = read_rows(base, source, start, stop).to(DTYPES[copy.dtype])
            if not torch.equal(ours, read_rows(adapter, copy, start, stop)):
                raise InvalidInput(
                    f"the adapter brings {copy.name}, and it is not the base's {source.name}: it "
                    "was trained or belongs to another base, and this merge does not support it."
                )


def _adder(adapter: RawFile, tensor: TensorPlan) -> _Adder:
    lora = tensor.lora
    assert lora is not None
    a, b = read_matrix(adapter, lora.a), read_matrix(adapter, lora.b)
    for name, matrix in ((lora.a.name, a), (lora.b.name, b)):
        if not torch.isfinite(matrix).all():
            raise InvalidInput(f"the adapter's tensor {name} holds NaN or infinite values")
    if tensor.transposed:
        return _Adder(left=a.T.contiguous(), right=b.T.contiguous(), scale=lora.scale)
    return _Adder(left=b, right=a, scale=lora.scale)


def _write_tensor(
    tensor: TensorPlan,
    entry: TensorEntry,
    base: RawFile,
    target: RawFile,
    adder: _Adder | None,
    pool: ThreadPoolExecutor,
    block_bytes: int,
) -> BlockStats:
    """Stream one tensor; a tensor that is only converted is taken as one long column."""
    source = tensor.source
    if adder is None:
        source, entry = _flat(source), _flat(entry)
    rows, columns = source.shape
    height = max(1, block_bytes // (4 * max(1, columns)))

    def block(start: int) -> BlockStats:
        stop = min(start + height, rows)
        stored = read_rows(base, source, start, stop)
        before = stored.float()
        delta = adder.delta(start, stop) if adder is not None else None
        after = (before + delta if delta is not None else before).to(DTYPES[entry.dtype])
        if not torch.isfinite(after).all():
            where = "the base's tensor" if not torch.isfinite(before).all() else "merging"
            raise InvalidInput(
                f"{where} {tensor.source.name} gives NaN or infinite values as {entry.dtype}"
            )
        target.write(entry.start + start * row_bytes(entry), view(after))
        return BlockStats.of(before, delta, after)

    return summed(pool.map(block, range(0, rows, height)))


def _flat(entry: TensorEntry) -> TensorEntry:
    """A tensor as one long column."""
    return replace(entry, shape=(math.prod(entry.shape), 1))


def _report(tensor: TensorPlan, stats: BlockStats) -> TensorReport:
    if stats.changed == 0:
        raise InvalidInput(
            f"the LoRA of {tensor.source.name} changes nothing"
            + (
                ": its B or its scale is zero. Train it first."
                if stats.delta_square == 0
                else f": all of it is lost to rounding to {tensor.dtype}. Merge to float32, or "
                "serve the adapter unmerged."
            )
        )
    return TensorReport.of(tensor.name, tensor.dtype, stats)


def copy_file(source: Path, target: Path, *, link: bool = False) -> None:
    """Put a file elsewhere: linked where allowed and possible, else copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, target)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, target)


def _write_index(plan: Plan, output: Path) -> None:
    index = plan.weights.index
    if index is None:
        return
    if all(shard.untouched or _same_shape(plan, shard) for shard in plan.shards):
        copy_file(plan.base / INDEX, output / INDEX)
        return
    places = {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors}
    total = sum(entry.size for shard in plan.shards for entry in encode_shard(shard)[2])
    metadata = {**index.get("metadata", {}), "total_size": total}
    document = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (output / INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _same_shape(plan: Plan, shard: ShardPlan) -> bool:
    """Whether a file keeps the names and the types it has in the base."""
    base = plan.weights.shards[shard.name].tensors
    return {t.name: t.dtype for t in shard.tensors} == {n: e.dtype for n, e in base.items()}


def _write_copies(plan: Plan, output: Path) -> None:
    for name, source in plan.copies.items():
        if name != CONFIG or not plan.config_changes:
            copy_file(source, output / name)
            continue
        config = read_json(source)
        for change in plan.config_changes:
            if change.after is None:
                del config[change.key]
            else:
                config[change.key] = change.after
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (output / CONFIG).write_text(text, encoding="utf-8")


def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """One thread a block, here and in the pool's threads; afterwards as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
