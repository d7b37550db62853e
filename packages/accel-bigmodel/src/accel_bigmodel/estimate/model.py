"""The sizes of a model, independent of their source. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a parameter by the dtype that a model is loaded in.
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}

ADAM_COPIES = 4  # weights, gradients, and two moments


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model in float32.

    Attributes:
        name: the repository, directory or file.
        source: what the sizes come from ("transformers", "timm", "safetensors").
        parameters: number of values.
        total: bytes of all weights and buffers in float32.
        largest_layer: bytes of the largest layer in float32.
        largest_layer_name: the name of that layer.
        whole: number of values in vectors (norms, biases), which tensor parallelism replicates.
    """

    name: str
    source: str
    parameters: int
    total: int
    largest_layer: int
    largest_layer_name: str
    whole: int = 0

    def total_in(self, dtype: str) -> int:
        """Bytes of the model in a dtype of ``DTYPE_BYTES``."""
        return int(self.total * DTYPE_BYTES[dtype] / 4)

    def largest_layer_in(self, dtype: str) -> int:
        """Bytes of the largest layer in a dtype of ``DTYPE_BYTES``."""
        return int(self.largest_layer * DTYPE_BYTES[dtype] / 4)

    def adam_in(self, dtype: str) -> int:
        """Bytes to train the model with Adam in a dtype, without activations."""
        return ADAM_COPIES * self.total_in(dtype)
