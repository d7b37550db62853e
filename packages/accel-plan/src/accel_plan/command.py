"""``accel plan``: what one rank of a configuration holds, sends and reads, computed without a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_launch.config.read import load_settings
from accel_launch.parser import ConfigParser, parse_options
from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.hardware import find_profile, profiles
from accel_state.humanize import convert_file_size_to_int
from accel_state.options import check, load_groups, resolve

from .models import SHAPES

if TYPE_CHECKING:
    from .plan import PlanRequest

# Options of accel launch that have no effect on a plan, or have another meaning here.
_LEFT_OUT = ("config_file", "json", "module", "no_python", "quiet", "dry_run")
_EPILOG = """\
Options of accel launch override the file: --mixed_precision, --num_machines, --fsdp_..., --parallelism_config_... .
The model, the wrapping and the step are real; they run on torch's fake process group and tensors without memory.
"""
# name: smallest number (None for text), metavar, help.
_VALUES: dict[str, tuple[int | None, str, str]] = {
    "rank": (0, "R", "the rank to show (default: 0)"),
    "batch_size": (1, "N", "batch size of the loader (default: 1)"),
    "seq_length": (1, "N", "tokens per sample (default: 2048, or the model's maximum if it is smaller)"),
    "global_batch_tokens": (1, "N", "with --auto: tokens of an optimizer step of all ranks"),
    "pp_schedule": (
        None,
        "NAME",
        "pipeline schedule: 1f1b (default), gpipe, interleaved1f1b, interleaved_zero_bubble, zbv or dualpipev",
    ),
    "pp_num_microbatches": (
        1,
        "N",
        "micro batches that a pipeline splits each rank's batch into (default: the pipeline size)",
    ),
    "pp_stages_per_rank": (1, "N", "pipeline stages per rank (default: 1 with 1f1b and gpipe, 2 with others)"),
}
_FIRST = ("config", "config_file", "model", "optimizer", "implementation", "memory", "hardware", "html", "output")
# What a search decides.
_DECIDED = (
    "rank", "batch_size", "split_batches", "all_blocks", "pp_schedule", "pp_num_microbatches", "pp_stages_per_rank"
)  # fmt: skip
_SWITCHES = {
    "auto": "search the configuration with the shortest step for --num_processes devices",
    "split_batches": "divide the loader's batch over the ranks",
    "all_blocks": "trace all of the model's equal blocks rather than extrapolating from two and three",
    "trust_remote_code": "run Python code from the model's repository; read it first",
    "json": "print JSON",
}


def run(argv: list[str]) -> int:
    """Check a configuration, and print the plan of one rank.

    Returns:
        0.

    Raises:
        ConfigurationError: the configuration cannot train the model on these ranks.
    """
    options = parse_options(argv, _parser())
    names = (*_FIRST, *_VALUES, *_SWITCHES)
    given = {name: options.pop(name) for name in names if name in options}
    config = _config_file(given.pop("config", None), given.pop("config_file", None), given.get("auto", False))
    options |= {"config_file": str(config)} if config else {}
    settings = load_settings(options) if config else check(resolve(load_groups(), options))
    for note in settings.notes():
        print(f"accel plan: {note}", file=sys.stderr)
    if "model" not in given:
        raise ConfigurationError(
            f"--model is missing. Give {', '.join(SHAPES)}, a config.json, a directory that contains one, or a "
            "repository on the Hub (owner/name)."
        )
    from .plan import PlanRequest

    if "memory" in given:
        given["memory_limit"] = _parse_bytes(given.pop("memory"))
    if "hardware" in given:
        given["hardware"] = find_profile(given["hardware"])
        given.setdefault("memory_limit", given["hardware"].memory_bytes)
    outputs = {name: given.pop(name, None) for name in ("auto", "output", "global_batch_tokens", "json", "html")}
    for name, (minimum, _, _) in _VALUES.items():
        values = outputs if name in outputs else given
        if values.get(name) is not None and minimum is not None:
            values[name] = _parse_number(name, values[name], minimum)
    request = PlanRequest(settings, **{name.removeprefix("pp_"): value for name, value in given.items()})
    _check_options(request, outputs, [name for name in _DECIDED if name in given])
    print(_search(request, outputs) if outputs["auto"] else _plan(request, outputs))
    return 0


def _plan(request: PlanRequest, outputs: Mapping[str, Any]) -> str:
    """Return the report of one configuration."""
    from .changes import changes_that_fit
    from .page import as_html
    from .plan import make_plan
    from .report import as_text

    plan, changes = make_plan(request), None
    if plan.peak is not None and plan.memory_limit is not None and plan.needed > plan.memory_limit:
        changes = changes_that_fit(plan, request)
    if outputs["html"] is not None:
        _write_page(Path(outputs["html"]), as_html(plan, request.hardware))
    if outputs["json"]:
        content = plan.as_dict() | ({} if changes is None else {"changes": asdict(changes)})
        return json.dumps(content, indent=2)
    return as_text(plan, changes)


def _search(request: PlanRequest, outputs: Mapping[str, Any]) -> str:
    """Return the report of a search."""
    from .search import search
    from .search_report import as_text, write_best

    found = search(request, outputs["global_batch_tokens"])
    lines = [json.dumps(found.as_dict(), indent=2) if outputs["json"] else as_text(found)]
    if outputs["output"] is not None:
        written = write_best(found, Path(outputs["output"]))
        if outputs["json"]:
            print(f"accel plan: {written}", file=sys.stderr)
        else:
            lines.append(written)
    return "\n".join(lines)


def _check_options(request: PlanRequest, outputs: Mapping[str, Any], decided: Sequence[str]) -> None:
    """Refuse options that do not belong together: those of a search, and those of a single plan."""
    if not outputs["auto"]:
        for name in ("global_batch_tokens", "output"):
            if outputs[name] is not None:
                raise ConfigurationError(f"--{name} is an option of a search. Add --auto, or leave it out.")
        return
    needed = {
        "hardware": request.hardware,
        "global_batch_tokens": outputs["global_batch_tokens"],
        "seq_length": request.seq_length,
        "num_processes": request.settings["num_processes"],
    }
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing:
        raise ConfigurationError(f"--auto needs {', '.join(missing)}.")
    if decided or outputs["html"] is not None:
        name = decided[0] if decided else "html"
        remedy = "It belongs to the plan of one configuration" if name == "html" else "The search decides it"
        raise ConfigurationError(f"--{name} does not go with --auto. {remedy}; leave it out.")


def _config_file(argument: str | None, option: str | None, auto: bool) -> Path | None:
    """Return the file, given as the argument or with ``--config_file``; a search needs none."""
    if argument is not None and option is not None and Path(argument) != Path(option):
        raise ConfigurationError(f"CONFIG {argument} contradicts --config_file {option}. Give one of them.")
    given = argument if argument is not None else option
    if given is None:
        if auto:
            return None
        raise ConfigurationError(
            "the configuration is missing. Give a configuration file of accel launch, as CONFIG or with --config_file; "
            "`accel config` writes one."
        )
    config = Path(given)
    if not config.expanduser().is_file():
        raise ConfigurationError(
            f"{'CONFIG' if option is None else '--config_file'} {config}: no such file (looked in {Path.cwd()}). "
            "Give a configuration file of accel launch; `accel config` writes one."
        )
    return config


def _write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--html {file} cannot be written: {error.strerror}. Give another file.") from None


def _parse_bytes(text: str) -> int:
    try:
        value = convert_file_size_to_int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigurationError(f"--memory {text}: must be a size such as 80GiB or 80GB.")
    return value


def _parse_number(name: str, text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise ConfigurationError(f"--{name} {text}: must be an integer of at least {minimum}.")
    return value


def _parser() -> ConfigParser:
    parser = ConfigParser(
        prog="accel plan",
        usage="accel plan CONFIG --model MODEL --num_processes N [options]\n       accel plan --auto --model MODEL "
        "--num_processes N --hardware NAME --global_batch_tokens N --seq_length N [options]",
        description="Check a configuration for thousands of ranks in one process, and print the memory, communication "
        "and data of one of them.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "configuration file of accel launch (.yaml, .yml or .json)"
    parser.add_argument("config", metavar="CONFIG", nargs="?", default=argparse.SUPPRESS, help=text)
    _add_argument(parser, "config_file", metavar="CONFIG", help="the same file, as accel launch takes it")
    text = "llama-3-8b, llama-3-70b, a config.json, a directory that contains one, or a repository on the Hub"
    _add_argument(parser, "model", help=text)
    optimizers = ["adamw", "adam", "sgd", "sgd_momentum"]
    _add_argument(parser, "optimizer", choices=optimizers, help="the optimizer (default: adamw)")
    _add_argument(
        parser,
        "optimizer_implementation",
        dest="implementation",
        choices=["for_loop", "foreach", "fused"],
        help="torch's implementation of the optimizer (default: foreach, or for_loop on the CPU)",
    )
    _add_argument(parser, "memory", metavar="SIZE", help="memory of the device, such as 80GiB, to compare with")
    text = "device for the time of a step and the memory to compare with: "
    text += f"{', '.join(profiles())}, or a file with the fields of such a profile"
    _add_argument(parser, "hardware", metavar="NAME", help=text)
    text = "write a page with the memory and the time of a step, and the mesh"
    _add_argument(parser, "html", metavar="FILE", help=text)
    _add_argument(parser, "output", metavar="FILE", help="with --auto: write the best configuration for accel launch")
    for name, (_, metavar, text) in _VALUES.items():
        _add_argument(parser, name, metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        _add_argument(parser, name, action="store_true", help=text)
    for group in load_groups():
        group.add_to_parser(parser, leave_out=_LEFT_OUT)
    return parser


def _add_argument(parser: ConfigParser, name: str, **settings: Any) -> None:
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*spellings, default=argparse.SUPPRESS, **settings)


COMMAND = Command("check a configuration for thousands of ranks, and show one rank's memory and communication", run)
