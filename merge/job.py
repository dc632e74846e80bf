"""The merge as a process of its own: ``python -m merge.job``.

A request comes as one line of JSON on stdin; see `merge.request` for what goes out. Memory,
crashes and cancellation of a merge stay with this process. Its stdin stays open for as long as
somebody waits for the result: when it closes, be it that the parent was killed, the process
ends at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

from merge.plan import Plan, make_plan
from merge.request import Request
from registry.errors import InvalidInput, SlipwayError, StorageFull
from registry.files import FULL

Say = Callable[[dict[str, Any]], None]

# Room for what a file system keeps beside the bytes of the files.
_SPARE_BYTES = 16 << 20


def run(request: Request, say: Say) -> dict[str, Any]:
    """Plan, apply and verify a merge; the summary and what happened to each tensor.

    Raises:
        SlipwayError: in its many kinds, when the merge cannot be done or is not right.
    """
    say(_progress(0, 0, "planning"))
    plan = make_plan(
        request.base,
        request.adapter,
        dtype=request.dtype,
        base_digest=request.base_digest,
        recorded_base_digest=request.recorded_base_digest,
    )
    # Imported once the plan stands: a refusal need not wait for torch.
    from merge.apply import apply, shard_size
    from merge.report import MergeReport, survival_warnings
    from merge.verify import verify_headers, verify_samples

    _check_room(sum(map(shard_size, plan.shards)), request.output)
    try:
        tensors = apply(
            plan,
            request.output,
            link=request.link,
            progress=lambda done, total, message: say(_progress(done, total, message)),
        )
    except EOFError:
        raise InvalidInput("a weight file was cut short while it was being read") from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _full() from error
    total = sum(map(shard_size, plan.shards))
    say(_progress(total, total, "verifying headers and sampled rows"))
    verification: dict[str, Any] = {
        "tensors": verify_headers(plan, request.output),
        "sampled_elements": verify_samples(plan, request.output),
    }
    warnings = survival_warnings(tensors)
    verification["logits"] = _logits(plan, request, say, total, warnings)
    report = MergeReport(
        dtype=plan.dtype,
        tensors=tensors,
        config_changes=[asdict(change) for change in plan.config_changes],
        verification=verification,
        warnings=warnings,
    )
    return {"report": report.summary(), "tensors": [asdict(tensor) for tensor in tensors]}


def _logits(
    plan: Plan, request: Request, say: Say, total: int, warnings: list[str]
) -> dict[str, Any]:
    from merge.verify import verify_logits

    if not request.logits:
        return {"skipped": "not asked for"}
    elements = sum(e.size for h in plan.weights.shards.values() for e in h.tensors.values()) // 2
    # One model at a time in float32, from 16-bit weights at the least.
    needed, available = 4 * elements, psutil.virtual_memory().available
    if needed > available // 2:
        reason = (
            f"running the model takes up to {needed >> 20} MB of memory, "
            f"{available >> 20} MB are free"
        )
        warnings.append(f"the merged model was not run against the adapter: {reason}")
        return {"skipped": reason}
    say(_progress(total, total, "comparing with the unmerged adapter"))
    result = verify_logits(plan, request.output)
    if result.divergence > result.base_divergence / 2:
        warnings.append(
            f"rounding to {plan.dtype} moves the model's answers by {result.divergence:.2g} nats, "
            f"the adapter by {result.base_divergence:.2g}: merge with dtype float32, or serve the "
            "adapter unmerged"
        )
    return result.describe()


def _check_room(size: int, output: Path) -> None:
    """Refuse at once what would fill the disk only after minutes."""
    free = shutil.disk_usage(output).free
    if size + _SPARE_BYTES > free:
        raise StorageFull(
            f"the merged model takes {size >> 20} MB and the disk has {free >> 20} MB free: "
            "nothing was registered. Free some space and try again."
        )


def _full() -> StorageFull:
    return StorageFull(
        "the disk is full: the merge was given up and nothing was registered. "
        "Free some space and try again; versions already registered are intact."
    )


def _progress(done: int, total: int, message: str) -> dict[str, Any]:
    return {"progress": {"done": done, "total": total, "message": message}}


def _end_with_parent(stdin: IO[str]) -> None:
    def watch() -> None:
        while stdin.read(1):
            pass
        os._exit(2)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run the request that comes on stdin."""
    lines = sys.stdout
    # Whatever a library prints goes to the log, so that stdout holds nothing but our lines.
    sys.stdout = sys.stderr

    def say(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    request = Request.model_validate_json(sys.stdin.readline())
    _end_with_parent(sys.stdin)
    try:
        say(run(request, say))
    except SlipwayError as error:
        say({"error": {"code": error.code, "message": error.message}})
    except MemoryError:
        say({"error": {"code": "unavailable", "message": "the merge ran out of memory"}})
    except Exception as error:
        traceback.print_exc()
        message = f"the merge failed ({type(error).__name__}); its log says how"
        say({"error": {"code": "error", "message": message}})
    else:
        return 0
    return 1


if __name__ == "__main__":
    status = main()
    # Not waiting for the thread that still reads stdin.
    sys.stderr.flush()
    os._exit(status)
