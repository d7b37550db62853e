"""Asks questions with menus on a terminal, and as lines of text elsewhere."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, TextIO

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.options import Option

# How choices are shown, if not by their value in the file.
LABELS = {
    "LOCAL_MACHINE": "This machine",
    "AMAZON_SAGEMAKER": "AWS (Amazon SageMaker)",
    "DATA_PARALLEL": "Data parallelism",
    "MODEL_PARALLEL": "Model parallelism",
}


def is_terminal() -> bool:
    """Whether the terminal supports menus."""
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and read_str("TERM") not in (None, "dumb")


def label(opt: Option, choice: str) -> str:
    """How a choice is shown."""
    if opt.name == "distributed_type":
        if choice == "NO":
            return "No distributed training"
        if choice.startswith("MULTI_"):
            return "multi-" + choice.removeprefix("MULTI_")
        # Users know the device by the name of the chip, not of its compiler.
        return LABELS.get(choice, "TPU")
    return LABELS.get(choice, choice)


def read_answer(opt: Option, text: str) -> Any:
    """The value of a typed answer; None for empty text."""
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ConfigurationError(f"{opt.name}: {text!r} contains bytes that are not text")
    return opt.parse(text, opt.name) if text.strip() else None


def _are_numbers(choices: tuple[str, ...]) -> bool:
    """Whether typed numbers are choices themselves, not positions."""
    return all(choice.isdecimal() for choice in choices)


class TextPrompts:
    """Questions and answers as lines of text, for pipes, scripts and simple terminals."""

    def __init__(self, source: TextIO | None = None) -> None:
        # Without an input (`<&-`), sys.stdin is None.
        self.source = source or sys.stdin or io.StringIO()

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
    """True, or the error, as questionary expects."""
    try:
        read_answer(opt, text)
    except ConfigurationError as error:
        return str(error)
    return True
