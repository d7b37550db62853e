"""Changes of what a checkpoint's files hold, for tests of states whose contents do not fit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.writer import write_manifest

DELETE = object()


def rewrite(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of what a file of torch's format holds."""

    def apply(directory: Path) -> None:
        content = torch.load(directory / name, weights_only=False)
        torch.save(change(content), directory / name)

    return apply


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    """A change that sets the value at a path of keys; the value :data:`DELETE` deletes what is there."""

    def apply(content: Any) -> Any:
        target = content
        for key in path[:-1]:
            target = target[key]
        if value is DELETE:
            del target[path[-1]]
        else:
            target[path[-1]] = value
        return content

    return apply


# What nothing is loaded from: settings that say how a state was saved.
SKIPPED = {"ds_config", "initial_lr"}


def plain(value: Any) -> Any:
    """A state as plain values in an order of their own, to compare."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return sorted([str(key), plain(item)] for key, item in value.items() if key not in SKIPPED)
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return value if isinstance(value, (int, float, str, type(None))) else [type(value).__name__, repr(vars(value))]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a file, and of what holds them."""
    found = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key not in SKIPPED:
            found += _places(item, (*path, key))
    return found


def _wrong_value(value: Any, draw: random.Random) -> Any:
    """Something that cannot be in the place of a value."""
    wrong: list[Any] = [DELETE, "x", [1, "x"], {"x": 1}]
    if isinstance(value, torch.Tensor):
        wrong += [torch.zeros(*value.shape, 2), value.new_zeros(value.numel() + 2)]
    elif isinstance(value, int):
        wrong += [10**30, -(10**30), 2.5]
    elif isinstance(value, float):
        wrong += [float("nan"), float("inf")]
    return draw.choice(wrong)


def _damage(directory: Path, pattern: str, seed: int) -> str:
    """Put something wrong into a place, drawn at random, of a file; returns what."""
    draw = random.Random(seed)
    path = draw.choice(sorted(directory.glob(pattern)))
    if seed % 10 == 0:
        path.write_bytes(b"") if seed % 20 else path.unlink()
        return f"{path.name} is empty or gone"
    safe = path.suffix == ".safetensors"
    content = load_file(path) if safe else torch.load(path, weights_only=False)
    place = draw.choice(_places(content))
    value = content
    for key in place:
        value = value[key]
    new = draw.choice([DELETE, value[..., None].contiguous(), value[1:]]) if safe else _wrong_value(value, draw)
    content = put(*place, value=new)(content)
    save_file(content, path) if safe else torch.save(content, path)
    return f"{path.name} {place}: {'deleted' if new is DELETE else new}"


def damaged_copies(good: Path, seeds: range, pattern: str) -> dict[Path, str]:
    """Copies of a checkpoint with consistent manifests, each with one thing in a file that is wrong; and what it is."""
    found = {}
    for seed in seeds:
        directory = good.parent / f"damaged_{seed}"
        shutil.copytree(good, directory)
        manifest = Manifest.read(good)
        assert manifest is not None
        found[directory] = _damage(directory, pattern, seed)
        (directory / MANIFEST_NAME).unlink()
        write_manifest(directory, manifest.world_size, manifest.counters)
    return found
