"""What a data set holds, as short texts that can be compared between ranks without reading a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from hashlib import blake2b
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch.utils.data import IterableDataset

_DEPTH = 6  # of objects within the data set
_OBJECTS = 200  # that are looked at
_ELEMENTS = 32  # of each sequence, evenly spaced
_PARTS = 8  # of each element
_TEXT = 200  # characters of a text
READERS = ("__getitem__", "__getitems__")
"""The methods through which a loader reads samples of a map-style data set."""


def contents(dataset: Any) -> dict[str, str]:
    """Lengths, fingerprints and digests of what determines the samples, by attribute.

    Of a map-style data set these are the sequences of one element per sample, such as the indices of a Subset, the rows
    of a TensorDataset or a list of files, and the integers that it reads for each, such as an offset. Of an
    iterable data set they are all sequences, and its numbers and texts.
    """
    stream = isinstance(dataset, IterableDataset)
    length = None if stream or not isinstance(dataset, Sized) else len(dataset)
    found = {} if length is None else {"length": str(length)}
    if fingerprint := _fingerprint(dataset):
        return found | {"fingerprint": fingerprint}
    for path, value in islice(_walk(dataset, "", _DEPTH, set()), _OBJECTS):
        if path.endswith("._fingerprint"):
            found[path] = str(value)
        elif _is_sequence(value):
            if stream or len(value) == length or path.endswith("indices"):
                found[path or "elements"] = digest(_sample(value))
        elif stream and "." not in path and isinstance(value, int | str):
            found[path] = str(value)[:_TEXT]
        elif not stream and type(value) is int and _is_read(dataset, path):
            found[path] = str(value)
    return found


def _is_read(dataset: Any, path: str) -> bool:
    """Whether the object that has an attribute reads it for each sample. A seed may differ between ranks."""
    *owners, name = path.split(".")
    for owner in owners:
        dataset = getattr(dataset, owner, None)
    return "seed" not in name and any(name in names_in(type(dataset), method) for method in READERS)


def names_in(kind: type, method: str) -> set[str]:
    """The names and texts in a method of a class, and in the methods that it calls."""
    waiting, seen, found = [method], set(), set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        code = getattr(getattr(kind, name, None), "__code__", None)
        if isinstance(code, CodeType):
            words = _words(code)
            found |= words
            waiting += [word for word in words - seen if hasattr(kind, word)]
    return found


def _words(code: CodeType) -> set[str]:
    """The names and texts in a function, and in the functions within it."""
    words = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            words |= _words(constant)
        elif isinstance(constant, str):
            words.add(constant)
    return words


def _fingerprint(value: Any) -> str | None:
    """That of Hugging Face's data sets, which tells more than what their objects hold."""
    found = getattr(value, "_fingerprint", None)
    return found if isinstance(found, str) else None


def digest(value: Any) -> str:
    """A short digest of the representation of a value."""
    return blake2b(repr(value).encode(), digest_size=6).hexdigest()


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """An object and what its attributes hold, by dotted path."""
    if id(value) in seen or depth < 0:
        return
    if not _is_plain(value):
        seen.add(id(value))
    if path or _is_sequence(value):
        yield path, value
    inner: Iterator[tuple[Any, Any]] = iter(())
    if fingerprint := _fingerprint(value):
        yield f"{path}._fingerprint", fingerprint
    elif isinstance(value, Mapping):
        inner = islice(value.items(), _ELEMENTS)
    elif isinstance(value, list | tuple):
        inner = ((index, each) for index, each in enumerate(value[:_ELEMENTS]) if not _is_plain(each))
    elif not isinstance(value, type) and not type(value).__module__.startswith(("torch.nn", "torch._", "builtins")):
        inner = iter(getattr(value, "__dict__", {}).items())
    for name, each in inner:
        if "cache" in str(name):  # filled as a process goes: that of datasets.IterableDataset has keys of the process
            continue
        yield from _walk(each, f"{path}.{name}" if path else str(name), depth - 1, seen)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or (hasattr(value, "dtype") and hasattr(value, "__getitem__")):
        return len(value.shape) > 0
    return isinstance(value, list | tuple | range) or hasattr(value, "iloc")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | bytes)


def _sample(values: Any) -> list[Any]:
    count = len(values)
    rows = getattr(values, "iloc", values)  # of a data frame
    positions = sorted({count * index // _ELEMENTS for index in range(_ELEMENTS)} | {max(count - 1, 0)})
    return [count, *(_part(rows[position]) for position in positions[:count])]


def _part(element: Any, depth: int = 2) -> Any:
    """What is compared of one element: its beginning; of objects only the type."""
    if _is_plain(element):
        return element[:_TEXT] if isinstance(element, str | bytes) else element
    if depth > 0 and isinstance(element, Mapping):
        return [(_part(key), _part(value, depth - 1)) for key, value in islice(element.items(), _PARTS)]
    if depth > 0 and isinstance(element, list | tuple):
        return [_part(each, depth - 1) for each in element[:_PARTS]]
    if callable(getattr(element, "tolist", None)):
        values = element.detach() if isinstance(element, torch.Tensor) else element
        values = values.reshape(-1)[:_PARTS] if hasattr(values, "reshape") else values
        return values.tolist()
    return type(element).__name__
