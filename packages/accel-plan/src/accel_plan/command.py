"""``accel plan``: what a configuration means for a rank of many, without a cluster."""

from __future__ import annotations

import argparse
import json
from typing import Any

from accel_launch.commands.base import Command
from accel_launch.config.read import load_settings
from accel_launch.parser import ConfigParser, parse_options
from accel_state.errors import ConfigurationError
from accel_state.options import load_groups

_OWN = (
    "model",
    "rank",
    "batch_size",
    "seq_length",
    "optimizer",
    "split_batches",
    "all_blocks",
    "trust_remote_code",
    "json",
    "config",
)
_OF_PIPELINES = ("pp_schedule", "pp_num_microbatches", "pp_stages_per_rank")
# What a plan has no use for, or calls something else.
_LEFT_OUT = ("config_file", "json", "module", "no_python", "quiet", "dry_run")
_EPILOG = """\
Options of accel launch may be given too, and win over the file: --mixed_precision, --num_machines, --fsdp_..., --parallelism_config_... .
Model, wrapping and step are the real ones, on torch's fake process group and tensors without memory.
"""


def run(argv: list[str]) -> int:
    """Check a configuration, and print what a rank of it holds, sends and reads.

    Returns:
        0.

    Raises:
        ConfigurationError: the configuration cannot train the model on so many processes.
    """
    options = parse_options(argv, _parser())
    own = {name: options.pop(name) for name in (*_OWN, *_OF_PIPELINES) if name in options}
    settings = load_settings({**options, "config_file": own["config"]})
    from .plan import Request, plan
    from .report import as_text

    _, parts, stages = _OF_PIPELINES
    found = plan(
        Request(
            settings=settings,
            model=own["model"],
            rank=_number("rank", own.get("rank", 0), 0),
            batch_size=_number("batch_size", own.get("batch_size", 1), 1),
            seq_length=_number("seq_length", own["seq_length"], 1) if "seq_length" in own else None,
            optimizer=own.get("optimizer", "adamw"),
            split_batches="split_batches" in own,
            all_blocks="all_blocks" in own,
            trust_remote_code="trust_remote_code" in own,
            schedule=own.get("pp_schedule"),
            num_microbatches=_number(parts, own[parts], 1) if parts in own else None,
            stages_per_rank=_number(stages, own[stages], 1) if stages in own else None,
        )
    )
    print(json.dumps(found.as_dict(), indent=2) if "json" in own else as_text(found))
    return 0


def _number(name: str, text: Any, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigurationError(f"--{name} {text} is no whole number from {least}.")
    return value


def _parser() -> ConfigParser:
    parser = ConfigParser(
        prog="accel plan",
        usage="accel plan CONFIG --model MODEL --num_processes N [options]",
        description="Check a configuration for thousands of ranks, in one process, and print what one of them holds, "
        "sends and reads.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    missing = argparse.SUPPRESS
    parser.add_argument("config", metavar="CONFIG", help="a configuration file of accel launch (.yaml, .yml or .json)")
    parser.add_argument(
        "--model",
        required=True,
        help="llama-3-8b, llama-3-70b, a config.json, a folder that has one, or a name on the Hub",
    )
    parser.add_argument("--rank", default=missing, metavar="R", help="the rank to show (default: 0)")
    parser.add_argument(
        "--batch_size", "--batch-size", default=missing, metavar="N", help="samples in a loader's batch (default: 1)"
    )
    length = "tokens in a sample (default: 2048, or as many as the model takes)"
    parser.add_argument("--seq_length", "--seq-length", default=missing, metavar="N", help=length)
    names = ["adamw", "adam", "sgd", "sgd_momentum"]
    parser.add_argument("--optimizer", choices=names, default=missing, help="what keeps its state (default: adamw)")
    for name, metavar, words in zip(
        _OF_PIPELINES,
        ("NAME", "N", "N"),
        (
            "of a pipeline: 1f1b (default), gpipe or interleaved1f1b",
            "parts that a pipeline divides each rank's batch into (default: the number of its ranks)",
            "stages on each rank of a pipeline (default: 1, or 2 with interleaved1f1b)",
        ),
        strict=True,
    ):
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), default=missing, metavar=metavar, help=words
        )
    for flag, words in (
        ("--split_batches", "the loader's batch is that of all ranks together"),
        (
            "--all_blocks",
            "take every one of many equal blocks; otherwise what two and three of them need says what the others do",
        ),
        ("--trust_remote_code", "run Python code that comes with the model; read it first"),
        ("--json", "print JSON"),
    ):
        parser.add_argument(
            *dict.fromkeys((flag, f"--{flag[2:].replace('_', '-')}")), action="store_true", default=missing, help=words
        )
    for group in load_groups():
        group.add_to_parser(parser, leave_out=_LEFT_OUT)
    return parser


COMMAND = Command("check a configuration for thousands of ranks, and show what each holds and sends", run)
