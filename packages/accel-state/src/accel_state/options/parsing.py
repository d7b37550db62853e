"""Values of options: from text, or from what a configuration file holds, to the value that is meant. Torch-free."""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..env import str_to_bool

if TYPE_CHECKING:
    from .option import Option

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
    dict: 'a mapping, such as {"name": 1}',
}


def allowed(opt: Option) -> str:
    """What may be given for an option, in words."""
    if opt.choices is not None:
        return "one of " + ", ".join(opt.choices)
    return _NAMES[opt.kind] + (f" of at least {opt.minimum:g}" if opt.minimum is not None else "")


def convert(opt: Option, raw: Any) -> Any:
    """The value that ``raw`` stands for.

    Raises:
        ValueError: it is not allowed; the message says what is.
    """
    if opt.kind in _STRUCTURES:
        return _STRUCTURES[opt.kind](opt, raw)
    if opt.parser is not None and isinstance(raw, (list, tuple)):
        raw = ",".join(map(str, raw))  # how the same values stand in a variable
    if isinstance(raw, (dict, list, tuple)):
        raise ValueError(f"{raw!r} is not {allowed(opt)}")
    text = str(raw).strip()
    if opt.parser is not None:
        return opt.parser(text)
    if opt.choices is not None:
        return _choose(opt, text)
    if opt.kind is bool:
        return bool(str_to_bool(text))
    return _not_empty(text) if opt.kind is str else _number(opt, raw, text)


def to_text(opt: Option, value: Any) -> str:
    """The text of a value; :func:`convert` reads it back."""
    if opt.kind is bool:
        return "true" if value else "false"
    if opt.kind in _STRUCTURES:
        return json.dumps(value)
    return str(value)


def _choose(opt: Option, text: str) -> Any:
    words = {choice.lower(): choice for choice in opt.choices or ()}
    words.update({word.lower(): choice for word, choice in opt.synonyms.items()})
    # YAML reads a bare `no` as false.
    word = "no" if text == "False" and "no" in words else text.lower()
    if word not in words:
        raise ValueError(f"{text!r} is not {allowed(opt)}")
    return opt.kind(words[word])


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("the value is empty; give text, or leave the option out")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise ValueError(f"{text!r} has a control character; give text on one line")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} holds something that is no character") from None
    return text


def _number(opt: Option, raw: Any, text: str) -> Any:
    try:
        if isinstance(raw, bool):
            raise ValueError
        number = opt.kind(text)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {allowed(opt)}") from None
    if opt.minimum is not None and not number >= opt.minimum:
        raise ValueError(f"{text} is not {allowed(opt)}")
    return number


def _texts(opt: Option, raw: Any) -> tuple[str, ...]:
    """A list as it is; text as a list written in JSON, or else as the only entry."""
    if isinstance(raw, str) and raw.strip().startswith("["):
        raw = _literal(opt, raw)
    entries = [raw] if isinstance(raw, str) else raw
    if not isinstance(entries, Sequence) or not all(isinstance(entry, (str, int, float)) for entry in entries):
        raise ValueError(f"{raw!r} is not {allowed(opt)}")
    return tuple(_not_empty(str(entry).strip()) for entry in entries)


def _mapping(opt: Option, raw: Any) -> dict[str, Any]:
    value = _literal(opt, raw) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{raw!r} is not {allowed(opt)}")
    return dict(value)


def _literal(opt: Option, text: str) -> Any:
    # What is no JSON may be a literal of Python.
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{text!r} is not {allowed(opt)}") from None


_STRUCTURES: Mapping[type, Callable[[Option, Any], Any]] = {tuple: _texts, dict: _mapping}
