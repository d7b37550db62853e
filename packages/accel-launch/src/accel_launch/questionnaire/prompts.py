"""How a question is put: with menus on a terminal, as plain text elsewhere."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, TextIO

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.options import Option

# Written words rather than values, where the values are the words of a file.
LABELS = {
    "LOCAL_MACHINE": "This machine",
    "AMAZON_SAGEMAKER": "AWS (Amazon SageMaker)",
    "DATA_PARALLEL": "Data parallelism",
    "MODEL_PARALLEL": "Model parallelism",
}


def is_terminal() -> bool:
    """Whether menus work here."""
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and read_str("TERM") not in (None, "dumb")


def label(opt: Option, choice: str) -> str:
    """How a choice is shown."""
    if opt.name == "distributed_type":
        if choice == "NO":
            return "No distributed training"
        if choice.startswith("MULTI_"):
            return "multi-" + choice.removeprefix("MULTI_")
        # The devices of this kind are known under the name of the chip rather than of its compiler.
        return LABELS.get(choice, "TPU")
    return LABELS.get(choice, choice)


def read_answer(opt: Option, text: str) -> Any:
    """The value of a typed answer; empty text is no answer.

    Raises:
        ConfigurationError: it is not allowed; the message says what is.
    """
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ConfigurationError(f"{opt.name}: {text!r} holds bytes that are no text")
    return opt.parse(text, opt.name) if text.strip() else None


def _are_numbers(choices: tuple[str, ...]) -> bool:
    """Whether a typed number is a choice itself, and not the position of one."""
    return all(choice.isdecimal() for choice in choices)


class TextPrompts:
    """Questions and answers as lines of text: for pipes, scripts, and terminals that can do no more."""

    def __init__(self, source: TextIO | None = None) -> None:
        # Started without any input (`<&-`), Python has no stdin at all.
        self.source = source or sys.stdin or io.StringIO()

    def ask(self, opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
        """Ask until the answer is allowed.

        Raises:
            ConfigurationError: the input has ended.
        """
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
            question += (
                "".join(f"\n  [{number}] {label(opt, choice)}" for number, choice in enumerate(choices))
                + "\nNumber or name"
            )
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
        """A question of the command's own; the end of the input is a no."""
        print(f"{question} [yes/NO]: ", end="", flush=True)
        return self.source.readline().strip().lower() in ("y", "yes")


class MenuPrompts:
    """Menus to move in with the arrow keys, and lines with what is proposed already filled in."""

    def ask(self, opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
        """Ask until the answer is allowed.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        import questionary

        shown = choices or opt.choices
        if shown:
            entries = [questionary.Choice(label(opt, choice), value=choice) for choice in shown]
            default = str(proposal) if str(proposal) in shown else None
            return opt.parse(
                questionary.select(str(opt.question), choices=entries, default=default).unsafe_ask(), opt.name
            )
        if opt.kind is bool:
            return questionary.confirm(str(opt.question), default=bool(proposal)).unsafe_ask()
        filled = "" if proposal in (None, ()) else opt.format(proposal)
        text = questionary.text(
            str(opt.question), default=filled, validate=lambda typed: _complaint(opt, typed)
        ).unsafe_ask()
        value = read_answer(opt, text)
        return proposal if value is None and opt.default is not None else value

    def confirm(self, question: str) -> bool:
        """A question of the command's own."""
        import questionary

        return bool(questionary.confirm(question, default=False).unsafe_ask())


def _complaint(opt: Option, text: str) -> bool | str:
    try:
        read_answer(opt, text)
    except ConfigurationError as error:
        return str(error)
    return True
