"""What the first samples of a stream are, as short texts by which ranks notice that they read different streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .contents import digest

_DEPTH = 3  # of lists and dictionaries in a sample
_TEXT = 200  # characters of a text


def describe(samples: list[Any]) -> str:
    """For each path in the samples, such as ``label``: a digest of its values, and whether they vary."""
    values: dict[str, list[str]] = {}
    for sample in samples:
        for path, text in _leaves(sample, "", _DEPTH):
            values.setdefault(path, []).append(text)
    return json.dumps({path: [digest(texts), len(set(texts)) > 1] for path, texts in values.items()})


def differing_path(own: str, other: str) -> str | None:
    """A path whose values differ between two descriptions; None if the samples are the same.

    Values that vary from sample to sample and are equal in both, such as labels, show that the samples are the same:
    other values may differ by random augmentation.
    """
    first, second = json.loads(own), json.loads(other)
    equal = [path for path in first if first[path] == second.get(path)]
    if any(varies for path in equal for varies in first[path][1:]):
        return None
    return next((path for path in first if path not in equal), None)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and depth:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}", depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}", depth - 1)
    elif isinstance(value, torch.Tensor):
        yield path, repr((tuple(value.shape), torch.as_tensor(value.detach(), dtype=torch.float64).sum().item()))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield path, repr((value.shape, float(value.sum(dtype=np.float64))))
    elif isinstance(value, str | bytes):
        yield path, repr((len(value), value[:_TEXT]))
    elif value is None or isinstance(value, int | float | np.generic):
        yield path, repr(value)
