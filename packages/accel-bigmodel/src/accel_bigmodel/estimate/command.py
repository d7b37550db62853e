"""``accel estimate-memory``. Imports torch only after the command line is parsed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.humanize import convert_bytes

from .model import DTYPE_BYTES, ModelSize
from .training import DIVISIONS, STRATEGIES, TrainingMemory, estimate_training, estimate_training_usage


def as_json(
    size: ModelSize,
    dtypes: Sequence[str],
    stages: dict[str, dict[str, int]] | None,
    training: Sequence[TrainingMemory] | None,
) -> str:
    """Return all results in bytes."""
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


def _table(header: Sequence[str], named: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Return a Markdown table whose rows are a name and sizes in bytes."""
    rows = [list(header), *([name, *map(convert_bytes, sizes)] for name, sizes in named)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        lines.append("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def parser(program: str = "accel estimate-memory") -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = argparse.ArgumentParser(
        program,
        description="Estimate the memory that a model needs to be loaded and to be trained. Downloads only its "
        "configuration or the headers of its files.",
    )
    options.add_argument(
        "model_name", help="a Hub repository, a directory, a .safetensors file or the index of a sharded checkpoint"
    )
    libraries = ["timm", "transformers", "safetensors"]
    text = "the library that builds the model; safetensors reads only the headers of its files (default: detect)"
    _add(options, "--library_name", choices=libraries, help=text)
    dtypes = list(DTYPE_BYTES)
    _add(
        options,
        "--dtypes",
        nargs="+",
        choices=dtypes,
        default=dtypes,
        help="dtypes to load the model in (default: all)",
    )
    _add(options, "--trust_remote_code", action="store_true", help="run the model's own Python code; read it first")
    _add(options, "--json", action="store_true", help="print bytes as JSON instead of tables")
    group = options.add_argument_group("training", "any of these adds the memory of training on each process")
    _add(group, "--training", action="store_true", help="training on one process, without activations")
    _add(group, "--num_processes", type=_positive, help="number of processes (default: 1)")
    _add(group, "--tensor_parallel", "--tp_size", type=_positive, help="processes that share each layer (default: 1)")
    text = "stages of Megatron-core's pipeline (default: 1); needs --strategy megatron"
    _add(group, "--pipeline_parallel", "--pp_size", type=_positive, help=text)
    text = f"rows of the table, from {', '.join(DIVISIONS)} (default: {' '.join(STRATEGIES)})"
    _add(group, "--strategy", nargs="+", choices=list(DIVISIONS), default=list(STRATEGIES), metavar="NAME", help=text)
    text = "copies of the model, each sharded separately; hybrid_shard has one on each node (default: 1)"
    _add(group, "--replicas", "--dp_replicate_size", type=_positive, default=1, help=text)
    _add(group, "--batch_size", type=_positive, help="samples in the batch of one process; includes activations")
    _add(group, "--sequence_length", type=_positive, default=512, help="tokens in a sample (default: 512)")
    _add(group, "--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="autocast (default: no)")
    text = "the optimizer, whose state is counted (default: adamw)"
    _add(group, "--optimizer", choices=["adamw", "adam", "sgd", "sgd_momentum"], default="adamw", help=text)
    return options


def _add(group: Any, *names: str, **settings: Any) -> None:
    """Add an option under its names, with underscores and with hyphens."""
    spellings = [spelling for name in names for spelling in (name, "--" + name[2:].replace("_", "-"))]
    group.add_argument(*dict.fromkeys(spellings), **settings)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def run(argv: list[str], program: str = "accel estimate-memory") -> int:
    """Print an estimate, and return the exit code."""
    options = parser(program).parse_args(argv)

    from .sources import model_size

    size = model_size(options.model_name, options.library_name, options.trust_remote_code)
    stages, training = None, None
    names = ("training", "num_processes", "tensor_parallel", "pipeline_parallel", "batch_size")
    if any(getattr(options, name) for name in names) or options.replicas > 1 or options.strategy != list(STRATEGIES):
        stages = {dtype: estimate_training_usage(size.total, dtype) for dtype in ("float32", "float16")}
        training = _training(size, options)
    if options.json:
        print(as_json(size, options.dtypes, stages, training))
        return 0
    rows: list[tuple[str, Sequence[int]]] = []
    for name in options.dtypes:
        rows.append((name, (size.largest_layer_in(name), size.total_in(name), size.adam_in(name))))
    header = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    print(f"Memory Usage for loading `{size.name}`:\n{_table(header, rows)}")
    if stages is not None and training is not None:
        header = ["dtype", *(name.capitalize() for name in next(iter(stages.values())))]
        rows = [(dtype, list(values.values())) for dtype, values in stages.items()]
        print(f"\nStages of a training step with Adam, without activations:\n{_table(header, rows)}")
        columns = ("weights", "gradients", "optimizer", "buffers", "activations", "total")
        rows = [(item.strategy, [getattr(item, column) for column in columns]) for item in training]
        header = ["strategy", *(column.capitalize() for column in columns)]
        print(f"\n{_title(options)}\n{_table(header, rows)}")
    return 0


def _training(size: ModelSize, options: argparse.Namespace) -> list[TrainingMemory]:
    activations = _activations(size, options) if options.batch_size else 0
    return [
        estimate_training(
            size.parameters,
            strategy,
            num_processes=_processes(options),
            tensor_parallel=options.tensor_parallel or 1,
            pipeline_parallel=options.pipeline_parallel or 1,
            replicas=options.replicas,
            whole=size.whole if options.tensor_parallel else 0,
            # Megatron-core has half-precision weights, where others compute in half precision with autocast.
            weight_bytes=2.0 if strategy == "megatron" and options.mixed_precision != "no" else 4.0,
            optimizer=options.optimizer,
            largest_layer=size.largest_layer,
            activations=activations,
        )
        for strategy in options.strategy
    ]


def _processes(options: argparse.Namespace) -> int:
    return int(options.num_processes or (options.tensor_parallel or 1) * (options.pipeline_parallel or 1))


def _activations(size: ModelSize, options: argparse.Namespace) -> int:
    from .activations import activations_of_config
    from .sources import config_path

    config = config_path(size.name) if size.source == "transformers" else None
    if config is None:
        raise ConfigurationError(
            f"--batch_size={options.batch_size}: measuring activations requires a transformers model, and the sizes of "
            f"{size.name} come from {size.source}. Leave out --batch_size, or give a directory or repository with a "
            "config.json."
        )
    return activations_of_config(
        config, options.batch_size, options.sequence_length, options.mixed_precision, options.trust_remote_code
    )


def _title(options: argparse.Namespace) -> str:
    parts = [f"{_processes(options)} process(es)", f"{options.optimizer}, float32 weights"]
    parts.append(f"mixed precision: {options.mixed_precision}")
    if options.tensor_parallel:
        parts.append(f"tensor parallel: {options.tensor_parallel}")
    if "megatron" in options.strategy and options.mixed_precision != "no":
        parts.append("megatron: half-precision weights")
    if options.pipeline_parallel:
        parts.append(f"pipeline parallel: {options.pipeline_parallel}")
    if options.replicas > 1:
        parts.append(f"{options.replicas} copies")
    if options.batch_size:
        parts.append(f"{options.batch_size} sample(s) of {options.sequence_length} tokens each")
    return f"Training, bytes on each process ({'; '.join(parts)}):"


# A command of the launcher (entry point group ``accel.commands``), which this package does not depend on.
COMMAND = SimpleNamespace(summary="estimate how much memory a model needs", run=run)
