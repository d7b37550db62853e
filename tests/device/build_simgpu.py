"""Compiles the device once for each torch and each version of its sources.

``python tests/device/build_simgpu.py`` prints the library's path, or why there is none, and then exits with status 1.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "torch_simgpu" / "csrc"
COMPILER = os.environ.get("CXX", "g++")


class BuildError(RuntimeError):
    """The device cannot be built here."""


def library() -> Path:
    """Where the library of this torch and these sources is, or will be."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    torch = importlib.metadata.version("torch")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch_simgpu" / f"{torch}-{digest.hexdigest()[:16]}" / "libsimgpu.so"


def build() -> Path:
    """Compile the library, if that has not been done; another process that needs it waits.

    Raises:
        BuildError: there is no compiler, or it refuses the sources with this torch's headers.
    """
    target = library()
    if target.exists():
        return target
    if shutil.which(COMPILER) is None:
        raise BuildError(f"the simulated GPU needs a C++ compiler, and {COMPILER} is not on the PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCES / "simgpu.cpp")]
    command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
    partial = target.with_suffix(".partial")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:5]
        raise BuildError(f"{COMPILER} cannot build the simulated GPU for this torch: " + "; ".join(errors))
    partial.rename(target)


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
