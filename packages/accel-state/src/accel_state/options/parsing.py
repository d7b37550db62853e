"""What an option accepts, and how its value is read from text, from a configuration file or from code. Torch-free."""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..env import str_to_bool
from ..errors import ConfigurationError

_KIND_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
    dict: 'a mapping, such as {"name": 1}',
}


@dataclass(frozen=True, kw_only=True)
class ValueSpec:
    """The values that an option accepts.

    Attributes:
        kind: type of a value: bool, int, float, str, tuple (of texts) or dict.
        choices: the only values allowed; compared without regard to case, and stored as spelled here.
        synonyms: other spellings of choices.
        minimum: lower bound of a number, inclusive.
        maximum: upper bound of a number, inclusive.
        parser: turns text into the value where ``kind`` and ``choices`` are not enough. Raises ValueError.
    """

    kind: type
    choices: tuple[str, ...] | None = None
    synonyms: Mapping[str, str] = field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None
    parser: Callable[[str], Any] | None = None

    def allowed(self) -> str:
        """Describe the accepted values, for messages."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        if self.maximum is not None:
            return f"{_KIND_NAMES[self.kind]} from {self.minimum or 0:g} to {int(self.maximum)}"
        return _KIND_NAMES[self.kind] + (f" of at least {self.minimum:g}" if self.minimum is not None else "")

    def convert(self, raw: Any) -> Any:
        """Read a value from text, or from what a configuration file holds; raises ValueError with what is allowed."""
        if self.kind is tuple:
            return self._texts(raw)
        if self.kind is dict:
            return self._mapping(raw)
        if self.parser is not None and isinstance(raw, (list, tuple)):
            raw = ",".join(map(str, raw))  # the form that the value has in an environment variable
        if isinstance(raw, (dict, list, tuple)):
            raise self._not_allowed(raw)
        text = str(raw).strip()
        if self.parser is not None:
            return self.parser(text)
        if self.choices is not None:
            return self._choose(text)
        if self.kind is bool:
            return bool(str_to_bool(text))
        return _clean_text(text) if self.kind is str else self._number(raw, text)

    def format(self, value: Any) -> str:
        """Write a value as text, as it is stored in an environment variable; :meth:`convert` reads it back."""
        if self.kind is bool:
            return "true" if value else "false"
        return json.dumps(value) if self.kind in (tuple, dict) else str(value)

    def check(self, name: str, value: Any) -> Any:
        """Check the value of an argument in code, where a bool is not an int and text is not a number.

        Returns:
            The value, with choices as they are spelled in the declaration.
        """
        expected: Any = (int, float) if self.kind is float else self.kind
        if self.parser is not None:
            expected = object
        if self.choices is not None:
            expected = (str, self.kind)
        try:
            if not isinstance(value, expected) or (isinstance(value, bool) and self.kind in (int, float)):
                raise self._not_allowed(value)
            return self.convert(value)
        except ValueError as error:
            problem = f": {error}" if self.parser is not None else f" is not {self.allowed()}."
            raise ConfigurationError(f"{name}={value!r}{problem}") from None

    def _not_allowed(self, raw: Any) -> ValueError:
        return ValueError(f"{raw!r} is not {self.allowed()}")

    def _choose(self, text: str) -> Any:
        spellings = {choice.lower(): choice for choice in self.choices or ()}
        spellings.update({synonym.lower(): choice for synonym, choice in self.synonyms.items()})
        # YAML reads a bare `no` as false.
        spelling = "no" if text == "False" and "no" in spellings else text.lower()
        if spelling not in spellings:
            raise self._not_allowed(text)
        return self.kind(spellings[spelling])

    def _number(self, raw: Any, text: str) -> Any:
        try:
            number = self.kind(text)
            valid = math.isfinite(number) and not isinstance(raw, bool)
        except (ValueError, OverflowError):
            valid = False
        if not valid or not (self.minimum is None or number >= self.minimum):
            raise self._not_allowed(text)
        if self.maximum is not None and number > self.maximum:
            raise self._not_allowed(text)
        return number

    def _texts(self, raw: Any) -> tuple[str, ...]:
        """Read a list, a list written as JSON, or a single text."""
        if isinstance(raw, str) and raw.strip().startswith("["):
            raw = self._literal(raw)
        entries = [raw] if isinstance(raw, str) else raw
        if not isinstance(entries, Sequence) or not all(isinstance(entry, (str, int, float)) for entry in entries):
            raise self._not_allowed(raw)
        return tuple(_clean_text(str(entry).strip()) for entry in entries)

    def _mapping(self, raw: Any) -> dict[str, Any]:
        value = self._literal(raw) if isinstance(raw, str) else raw
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._not_allowed(raw)
        return dict(value)

    def _literal(self, text: str) -> Any:
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        try:
            return ast.literal_eval(text)  # the repr of a Python value is accepted too
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise self._not_allowed(text) from None


def _clean_text(text: str) -> str:
    if not text:
        raise ValueError("the value is empty; give text, or leave the option out")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise ValueError(f"{text!r} contains a control character; give text on one line")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} contains a character that cannot be encoded") from None
    return text
