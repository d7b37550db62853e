"""AMD GPUs."""

from __future__ import annotations

from pathlib import Path

from .base import AcceleratorKind


class Amd(AcceleratorKind):
    """Counts the nodes with SIMD units in the kernel driver's topology; nodes without are CPUs."""

    visible_variables: tuple[str, ...] = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    kubernetes_resource = "amd.com/gpu"

    def __init__(self, topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> None:
        self._topology = topology

    def count_installed(self) -> int:
        """Nodes whose ``simd_count`` is not 0."""
        return sum(_has_simd(properties) for properties in self._topology.glob("*/properties"))


def _has_simd(properties: Path) -> bool:
    try:
        words = properties.read_text().split()
    except OSError:
        # A container may list GPUs that it must not use.
        return False
    return dict(zip(words[::2], words[1::2], strict=False)).get("simd_count", "0") != "0"
