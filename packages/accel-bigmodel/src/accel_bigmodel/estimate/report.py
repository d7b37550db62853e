"""The answer of the command, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from accel_state.humanize import convert_bytes

from .model import ModelSize
from .training import TrainingMemory


def as_json(
    size: ModelSize,
    dtypes: Sequence[str],
    stages: dict[str, dict[str, int]] | None,
    training: Sequence[TrainingMemory] | None,
) -> str:
    """Everything in bytes."""
    answer: dict[str, Any] = {
        "model": size.name,
        "source": size.source,
        "parameters": size.parameters,
        "largest_layer_name": size.largest_layer_name,
        "dtypes": {
            dtype: {
                "largest_layer": size.largest_layer_in(dtype),
                "total": size.total_in(dtype),
                "training_adam": size.adam_in(dtype),
            }
            for dtype in dtypes
        },
    }
    if stages is not None:
        answer["training_stages"] = stages
    if training is not None:
        answer["training_per_process"] = {
            memory.strategy: {**vars(memory), "total": memory.total} for memory in training
        }
    return json.dumps(answer, indent=2)


def loading_table(size: ModelSize, dtypes: Sequence[str]) -> str:
    """What loading the model takes in each type."""
    rows = [
        [dtype, *map(convert_bytes, (size.largest_layer_in(dtype), size.total_in(dtype), size.adam_in(dtype)))]
        for dtype in dtypes
    ]
    return (
        f"Memory Usage for loading "
        f"`{size.name}`:\n{table(['dtype', 'Largest Layer', 'Total Size', 'Training using Adam'], rows)}"
    )


def stages_table(stages: dict[str, dict[str, int]]) -> str:
    """What each stage of a training step takes on one process."""
    names = list(next(iter(stages.values())))
    rows = [[dtype, *map(convert_bytes, values.values())] for dtype, values in stages.items()]
    return (
        f"Stages of a training step with Adam, without "
        f"activations:\n{table(['dtype', *(name.capitalize() for name in names)], rows)}"
    )


def training_table(training: Sequence[TrainingMemory], title: str) -> str:
    """What training takes on each process, for every strategy."""
    columns = ("weights", "gradients", "optimizer", "buffers", "activations", "total")
    rows = [[memory.strategy, *(convert_bytes(getattr(memory, column)) for column in columns)] for memory in training]
    return f"{title}\n{table(['strategy', *(column.capitalize() for column in columns)], rows)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, which reads well in a terminal too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
