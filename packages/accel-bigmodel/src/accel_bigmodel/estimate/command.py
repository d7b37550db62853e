"""``accel estimate-memory``. Nothing heavy is imported before the command line is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.errors import ConfigurationError

from .model import DTYPE_BYTES, ModelSize
from .training import DIVISIONS, STRATEGIES

if TYPE_CHECKING:
    from .training import TrainingMemory


@dataclass(frozen=True)
class Command:
    """A subcommand, in the form that the launcher's entry point group ``accel.commands`` asks for.

    Attributes:
        summary: one line for ``accel --help``.
        run: takes the arguments, returns the exit code.
    """

    summary: str
    run: Callable[[list[str]], int]


def parser(program: str = "accel estimate-memory") -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(
        program,
        description="How much memory a model needs: to load it, and to train it. Nothing but its configuration or the "
        "headers of its files "
        "is downloaded.",
    )
    options.add_argument(
        "model_name", help="a repository on the Hub, a folder, a .safetensors file or the index of a sharded checkpoint"
    )
    options.add_argument(
        "--library_name",
        "--library-name",
        choices=["timm", "transformers", "safetensors"],
        help="what builds the model; safetensors reads the headers of its files and runs no code of the model "
        "(default: find out)",
    )
    options.add_argument(
        "--dtypes",
        nargs="+",
        choices=list(DTYPE_BYTES),
        default=list(DTYPE_BYTES),
        help="the types to load the model in (default: all)",
    )
    options.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model; read it first",
    )
    options.add_argument("--json", action="store_true", help="print bytes as JSON rather than tables")
    _add_training(options.add_argument_group("training", "any of these adds what training takes on each process"))
    return options


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--training", action="store_true", help="also show training, on one process and without activations"
    )
    group.add_argument("--num_processes", "--num-processes", type=_positive, help="number of processes (default: 1)")
    group.add_argument(
        "--tensor_parallel",
        "--tensor-parallel",
        "--tp_size",
        "--tp-size",
        type=_positive,
        help="processes that share each layer (default: 1)",
    )
    group.add_argument(
        "--strategy",
        nargs="+",
        choices=list(DIVISIONS),
        default=list(STRATEGIES),
        metavar="NAME",
        help=f"rows of the table, of {', '.join(DIVISIONS)} (default: {' '.join(STRATEGIES)})",
    )
    group.add_argument(
        "--replicas",
        "--dp_replicate_size",
        "--dp-replicate-size",
        type=_positive,
        default=1,
        help="copies of the model, each of which is divided by itself, as hybrid_shard has one on each node (default: "
        "1)",
    )
    group.add_argument(
        "--batch_size",
        "--batch-size",
        type=_positive,
        help="samples in the batch of one process: activations are counted",
    )
    group.add_argument(
        "--sequence_length", "--sequence-length", type=_positive, default=512, help="tokens in a sample (default: 512)"
    )
    group.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        choices=["no", "fp16", "bf16"],
        default="no",
        help="autocast (default: no)",
    )
    group.add_argument(
        "--optimizer",
        choices=["adamw", "adam", "sgd", "sgd_momentum"],
        default="adamw",
        help="what keeps its state (default: adamw)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def run(argv: list[str], program: str = "accel estimate-memory") -> int:
    """Estimate, print, and return the exit code.

    Raises:
        ConfigurationError: there is no such model, or it says too little of itself.
        MissingDependencyError: the library that builds it is not installed.
    """
    options = parser(program).parse_args(argv)

    from . import report
    from .sources import model_size

    size = model_size(options.model_name, options.library_name, options.trust_remote_code)
    wants_training = options.training or any(
        (
            options.num_processes,
            options.tensor_parallel,
            options.batch_size,
            options.replicas > 1,
            options.strategy != list(STRATEGIES),
        )
    )
    stages = _stages(size) if wants_training else None
    training = _training(size, options) if wants_training else None
    if options.json:
        print(report.as_json(size, options.dtypes, stages, training))
        return 0
    print(report.loading_table(size, options.dtypes))
    if stages is not None and training is not None:
        print(f"\n{report.stages_table(stages)}\n\n{report.training_table(training, _title(options))}")
    return 0


def _stages(size: ModelSize) -> dict[str, dict[str, int]]:
    from .training import estimate_training_usage

    return {dtype: estimate_training_usage(size.total, dtype) for dtype in ("float32", "float16")}


def _training(size: ModelSize, options: argparse.Namespace) -> list[TrainingMemory]:
    from .training import estimate_training

    activations = _activations(size, options) if options.batch_size else 0
    return [
        estimate_training(
            size.parameters,
            strategy,
            num_processes=options.num_processes or options.tensor_parallel or 1,
            tensor_parallel=options.tensor_parallel or 1,
            replicas=options.replicas,
            whole=size.whole if options.tensor_parallel else 0,
            optimizer=options.optimizer,
            largest_layer=size.largest_layer,
            activations=activations,
        )
        for strategy in options.strategy
    ]


def _activations(size: ModelSize, options: argparse.Namespace) -> int:
    from .activations import activations_of_config
    from .sources import config_path

    config = config_path(size.name) if size.source == "transformers" else None
    if config is None:
        raise ConfigurationError(
            f"--batch_size={options.batch_size}: activations are counted by running the model of transformers without "
            "memory, and the "
            f"sizes of {size.name} come from {size.source}. Leave --batch_size out, or give a folder or repository "
            "with a config.json."
        )
    return activations_of_config(
        config, options.batch_size, options.sequence_length, options.mixed_precision, options.trust_remote_code
    )


def _title(options: argparse.Namespace) -> str:
    processes = options.num_processes or options.tensor_parallel or 1
    parts = [
        f"{processes} process(es)",
        f"{options.optimizer}, float32 weights",
        f"mixed precision: {options.mixed_precision}",
    ]
    if options.tensor_parallel:
        parts.append(f"tensor parallel: {options.tensor_parallel}")
    if options.replicas > 1:
        parts.append(f"{options.replicas} copies")
    if options.batch_size:
        parts.append(f"{options.batch_size} sample(s) of {options.sequence_length} tokens each")
    return f"Training, bytes on each process ({'; '.join(parts)}):"


COMMAND = Command("estimate how much memory a model needs", run)
