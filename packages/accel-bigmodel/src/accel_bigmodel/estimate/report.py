"""The output of the command, as tables or as JSON."""

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
    """All results in bytes."""
    loading = {}
    for dtype in dtypes:
        largest_layer, total = size.largest_layer_in(dtype), size.total_in(dtype)
        loading[dtype] = {"largest_layer": largest_layer, "total": total, "training_adam": size.adam_in(dtype)}
    answer: dict[str, Any] = {
        "model": size.name,
        "source": size.source,
        "parameters": size.parameters,
        "largest_layer_name": size.largest_layer_name,
        "dtypes": loading,
    }
    if stages is not None:
        answer["training_stages"] = stages
    if training is not None:
        answer["training_per_process"] = {item.strategy: {**vars(item), "total": item.total} for item in training}
    return json.dumps(answer, indent=2)


def loading_table(size: ModelSize, dtypes: Sequence[str]) -> str:
    """The memory to load the model in each dtype."""
    rows = []
    for dtype in dtypes:
        sizes = (size.largest_layer_in(dtype), size.total_in(dtype), size.adam_in(dtype))
        rows.append([dtype, *map(convert_bytes, sizes)])
    header = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    return f"Memory Usage for loading `{size.name}`:\n{_table(header, rows)}"


def stages_table(stages: dict[str, dict[str, int]]) -> str:
    """The memory in use at each stage of a training step on one process."""
    header = ["dtype", *(name.capitalize() for name in next(iter(stages.values())))]
    rows = [[dtype, *map(convert_bytes, values.values())] for dtype, values in stages.items()]
    return f"Stages of a training step with Adam, without activations:\n{_table(header, rows)}"


def training_table(training: Sequence[TrainingMemory], title: str) -> str:
    """The memory of training on each process, for every strategy."""
    columns = ("weights", "gradients", "optimizer", "buffers", "activations", "total")
    rows = [[item.strategy, *(convert_bytes(getattr(item, column)) for column in columns)] for item in training]
    return f"{title}\n{_table(['strategy', *(column.capitalize() for column in columns)], rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        lines.append("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
