"""NVIDIA GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .base import AcceleratorKind

_NVIDIA_SMI_SECONDS = 20


class Nvidia(AcceleratorKind):
    """Counts device nodes, of which a container has only its own GPUs' ones, or else asks ``nvidia-smi``."""

    visible_variables: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
    kubernetes_resource = "nvidia.com/gpu"

    def __init__(self, dev: Path = Path("/dev")) -> None:
        self._dev = dev

    def count_installed(self) -> int:
        """Device nodes /dev/nvidia0, /dev/nvidia1, ...; without any (WSL, for example), the GPUs of nvidia-smi."""
        nodes = sum(1 for node in self._dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
        return nodes or self._ask_nvidia_smi()

    def _ask_nvidia_smi(self) -> int:
        program = shutil.which("nvidia-smi")
        if program is None:
            return 0
        try:
            listing = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError):
            # A driver that does not respond has no usable GPU.
            return 0
        return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))
