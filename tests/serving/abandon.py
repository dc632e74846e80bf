"""A control plane that is about to be killed: serves an endpoint, says so, and waits.

python abandon.py HOME
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("parts", Path(__file__).with_name("conftest.py"))
assert spec is not None
assert spec.loader is not None
parts = importlib.util.module_from_spec(spec)
sys.modules["parts"] = parts
spec.loader.exec_module(parts)


async def main() -> None:
    async with parts.open_stack(Path(sys.argv[1]), gateway=True) as stack:
        stack.version(says="still here")
        job = await stack.deploy("chat", "g/1")
        assert job.status == "done", job
        await stack.routed(lambda content: bool(content["keys"]))
        sys.stdout.write(json.dumps({"gateway": stack.gateway.url, "key": stack.key}) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


asyncio.run(main())
