"""Chooses the next question from the answers so far; the options declare the questions themselves."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

from accel_state.enums import REMOVED_DYNAMO_BACKENDS
from accel_state.env import all_variables, read_str
from accel_state.errors import ConfigurationError
from accel_state.options.cloud import SageMakerOptions, TpuOptions
from accel_state.options.conflicts import ENGINES, check
from accel_state.options.core import CheckpointingOptions, DynamoOptions
from accel_state.options.declaration import GIVEN, MORE_THAN_ONE, NO_RANGE, Option, OptionGroup
from accel_state.options.deepspeed import DeepSpeedOptions
from accel_state.options.fp8 import FP8Options
from accel_state.options.fsdp import FsdpOptions
from accel_state.options.launch import CLOUD_TYPES, LOCAL_TYPES, ParadigmOptions
from accel_state.options.parallelism import MegatronOptions, ParallelismOptions
from accel_state.options.registry import all_options, load_groups
from accel_state.options.rendezvous import MpiOptions
from accel_state.options.resolution import Resolution, resolve
from accel_state.options.resources import MachineRange

from ..accelerators.registry import find_visible
from ..config.write import BASE
from ..cpus import default_cpu_processes

# How choices are shown, if not by their value in the file.
LABELS = {
    "LOCAL_MACHINE": "This machine",
    "AMAZON_SAGEMAKER": "AWS (Amazon SageMaker)",
    "DATA_PARALLEL": "Data parallelism",
    "MODEL_PARALLEL": "Model parallelism",
}


def is_terminal() -> bool:
    """Return True if the terminal supports menus."""
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and read_str("TERM") not in (None, "dumb")


def label(opt: Option, choice: str) -> str:
    """Return how a choice is shown."""
    if opt.name == "distributed_type":
        if choice == "NO":
            return "No distributed training"
        if choice == "MULTI_TPU":
            return "TPU with torch_tpu"
        if choice.startswith("MULTI_"):
            return "multi-" + choice.removeprefix("MULTI_")
        # Users know the device by the name of the chip, not of its compiler.
        return LABELS.get(choice, "TPU")
    return LABELS.get(choice, choice)


def read_answer(opt: Option, text: str) -> Any:
    """Return the value of a typed answer; None for empty text."""
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ConfigurationError(f"{opt.name}: {text!r} contains bytes that are not text")
    return opt.parse(text, opt.name) if text.strip() else None


def _are_numbers(choices: tuple[str, ...]) -> bool:
    """Return True if typed numbers are choices themselves, not positions."""
    return all(choice.isdecimal() for choice in choices)


class TextPrompts:
    """Questions and answers as lines of text, for pipes, scripts and simple terminals."""

    def __init__(self, source: TextIO | None = None) -> None:
        # Without an input (`<&-`), sys.stdin is None.
        self.source: TextIO = source or sys.stdin or io.StringIO()

    def ask(self, opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
        """Ask until the answer is allowed."""
        shown = choices or opt.choices
        while True:
            print(self._question(opt, proposal, shown), end="", flush=True)
            line = self.source.readline()
            if not line:
                raise ConfigurationError(f"the input ended at the question for {opt.name}; nothing was written.")
            print("" if self.source.isatty() else line.strip())
            if not line.strip():
                return proposal
            try:
                return self._choose(opt, line.strip(), shown)
            except ConfigurationError as error:
                print(f"  {error}")

    def _question(self, opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> str:
        question = str(opt.question)
        if choices and _are_numbers(choices):
            question += f" ({', '.join(choices)})"
        elif choices:
            lines = [f"\n  [{number}] {label(opt, choice)}" for number, choice in enumerate(choices)]
            question += "".join([*lines, "\nNumber or name"])
        if opt.kind is bool:
            return f"{question} [{'YES/no' if proposal else 'yes/NO'}]: "
        return f"{question} " if proposal in (None, ()) else f"{question} [{opt.format(proposal)}]: "

    def _choose(self, opt: Option, text: str, choices: tuple[str, ...] | None) -> Any:
        if choices and text.isdecimal() and not _are_numbers(choices) and int(text) < len(choices):
            return opt.parse(choices[int(text)], opt.name)
        if not choices:
            return read_answer(opt, text)
        named = {label(opt, choice).lower(): choice for choice in choices}
        with suppress(ConfigurationError):
            value = read_answer(opt, named.get(text.lower(), text))
            if str(value) in choices:
                return value
        raise ConfigurationError(f"{text!r} is not one of {', '.join(label(opt, choice) for choice in choices)}")

    def confirm(self, question: str) -> bool:
        """Ask a yes-or-no question; the end of the input means no."""
        print(f"{question} [yes/NO]: ", end="", flush=True)
        return self.source.readline().strip().lower() in ("y", "yes")


class MenuPrompts:
    """Menus for the arrow keys, and lines with the proposed value filled in."""

    def ask(self, opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
        """Ask until the answer is allowed."""
        import questionary

        shown = choices or opt.choices
        if shown:
            entries = [questionary.Choice(label(opt, choice), value=choice) for choice in shown]
            default = str(proposal) if str(proposal) in shown else None
            choice = questionary.select(str(opt.question), choices=entries, default=default).unsafe_ask()
            return opt.parse(choice, opt.name)
        if opt.kind is bool:
            return questionary.confirm(str(opt.question), default=bool(proposal)).unsafe_ask()
        filled = "" if proposal in (None, ()) else opt.format(proposal)
        prompt = questionary.text(str(opt.question), default=filled, validate=lambda typed: _validate(opt, typed))
        value = read_answer(opt, prompt.unsafe_ask())
        return proposal if value is None and opt.default is not None else value

    def confirm(self, question: str) -> bool:
        """Ask a yes-or-no question."""
        import questionary

        return bool(questionary.confirm(question, default=False).unsafe_ask())


def _validate(opt: Option, text: str) -> bool | str:
    """Return True, or the error, as questionary expects."""
    try:
        read_answer(opt, text)
    except ConfigurationError as error:
        return str(error)
    return True


# Options and groups, in the order of the questions.
Order = tuple[str | type[OptionGroup], ...]
LOCAL_ORDER: Order = (
    *("distributed_type", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("same_network", "rdzv_backend", "machine_timeout", "debug", "cpu"),
    *(MpiOptions, DynamoOptions, ParadigmOptions, DeepSpeedOptions, FsdpOptions),
    *(ParallelismOptions, MegatronOptions, CheckpointingOptions, "tpu_cluster"),
    *("num_processes", "gpu_ids", "enable_cpu_affinity", "mixed_precision"),
    *(FP8Options, "gradient_accumulation_steps", TpuOptions),
)
CLOUD_ORDER: Order = (
    *(SageMakerOptions, "distributed_type", DynamoOptions, "num_machines", "mixed_precision", FP8Options),
)

Ask = Callable[[Option, Any, tuple[str, ...] | None], Any]
"""Asks for an option, given the option, the proposed value, and its choices if restricted; returns a value or None."""


def ask_all(ask: Ask, known: Mapping[str, Any]) -> dict[str, Any]:
    """Ask all questions, and return the answers by option."""
    answers: dict[str, Any] = {}
    for opt in questions(answers):
        choices = _choices(opt, answers)
        proposal = propose(opt, known, answers)
        answers[opt.name] = ask(opt, proposal if choices is None or proposal in choices else choices[0], choices)
    return answers


def questions(answers: Mapping[str, Any]) -> Iterator[Option]:
    """Yield the options to ask for; each depends on ``answers``, which the caller fills in between."""
    options = all_options()
    yield options["compute_environment"]
    cloud = answers.get("compute_environment") == "AMAZON_SAGEMAKER"
    for opt, group in _ordered(CLOUD_ORDER if cloud else LOCAL_ORDER):
        if opt.question is not None and opt.name not in answers and _is_asked(opt, group, answers):
            yield opt


def _ordered(order: Order) -> Iterator[tuple[Option, type[OptionGroup]]]:
    owners = {opt.name: (opt, group) for group in load_groups() for opt in group.options()}
    for entry in order:
        if isinstance(entry, str):
            yield owners[entry]
        else:
            yield from ((opt, entry) for opt in entry.options())


def _is_asked(opt: Option, group: type[OptionGroup], answers: Mapping[str, Any]) -> bool:
    conditions = dict(opt.asked_when)
    if group.enabled_by is not None:
        name, value = group.enabled_by
        conditions[name] = (value,)
    return all(_holds(_value(name, answers), allowed) for name, allowed in conditions.items())


def _holds(value: Any, allowed: tuple[Any, ...]) -> bool:
    if MORE_THAN_ONE in allowed:
        fits = not (NO_RANGE in allowed and isinstance(value, MachineRange))
        return fits and isinstance(value, int) and value > 1
    return value is not None if GIVEN in allowed else value in allowed


def _value(name: str, answers: Mapping[str, Any]) -> Any:
    """Return the answer, the value implied by the distributed type, or the default."""
    if name == "cpu" and answers.get("distributed_type") == "MULTI_CPU":
        return True
    return answers.get(name, all_options()[name].default)


def _choices(opt: Option, answers: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the choices that apply; None for all."""
    if opt.name == "dynamo_backend":
        return tuple(name for name in opt.choices or () if name not in REMOVED_DYNAMO_BACKENDS)
    if opt.name != "distributed_type":
        return None
    if answers.get("compute_environment") == "AMAZON_SAGEMAKER":
        return CLOUD_TYPES
    # Each engine has a question of its own.
    engines = [kind for name, kind in ENGINES.items() if name != "tpu"]
    if importlib.util.find_spec("torch_tpu") is None:
        engines.append("MULTI_TPU")  # without it, TPU is a question of torch_xla alone
    return tuple(kind for kind in LOCAL_TYPES if kind not in engines)


def propose(opt: Option, known: Mapping[str, Any], answers: Mapping[str, Any]) -> Any:
    """Return the value to propose: from the file, else for this machine, else the suggestion, else the default."""
    if known.get(opt.name) is not None:
        return known[opt.name]
    count, machines = find_visible(all_variables()).count, _value("num_machines", answers) or 1
    on_cores = machines == 1 and answers.get("distributed_type") == "MULTI_CPU"
    machine = {
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "num_processes": default_cpu_processes() if on_cores else max(1, count) * machines,
        "cpu": count == 0,
        "main_process_port": 29500,
    }
    for value in (machine.get(opt.name), opt.suggested):
        if value is not None:
            return value
    return opt.default


def known_values(settings: Resolution) -> dict[str, Any]:
    """Return the values of a file, as proposals.

    An engine that is the distributed type becomes an answer of its own.
    """
    values = {name: setting.value for name, setting in settings.settings.items() if settings.is_set(name)}
    if values.get("distributed_type") in ENGINES.values() and values["distributed_type"] != ENGINES["tpu"]:
        values["distributed_type"] = "MULTI_CPU" if values.get("cpu") else "MULTI_GPU"
    return values


def complete(answers: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a complete file: the answers, the keys of every file, and values of the old file not asked for."""
    groups, asked = load_groups(), {name for name, opt in all_options().items() if opt.question is not None}
    values = {name: value for name, value in answers.items() if value is not None and value != ()}
    if values.get("distributed_type") == "MULTI_CPU":
        values["cpu"] = True
    elif values.get("distributed_type") == "NO" and values["compute_environment"] == "LOCAL_MACHINE":
        values.setdefault("num_processes", 1)
    settings = check(resolve(groups, values, environ={}))
    kept = {name: value for name, value in known.items() if name not in asked and _is_kept(name, settings)}
    base = {name: settings[name] for name in BASE if values["compute_environment"] == "LOCAL_MACHINE"}
    # No question asks for replicas, and they would contradict the answers about engines and processes.
    switches = {*ENGINES, "use_parallelism_config", "ft"}
    complete_values = {**base, **kept, **values, "distributed_type": settings["distributed_type"]}
    return {name: value for name, value in complete_values.items() if name not in switches}


def _is_kept(name: str, settings: Resolution) -> bool:
    opt = settings.settings[name].option
    owner = next(group for group in settings.groups if opt in group.options())
    return settings.is_enabled(owner) and opt.retired is None and name not in BASE
