"""``accel monitor show-batch``: the samples of a step whose loss or gradient norm was bad."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from ..records import Run, bad_step_sentence, chosen_run
from .command import add_run_arguments


def run(argv: Sequence[str]) -> int:
    """Run ``accel monitor show-batch``.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no such run, step or loader.
    """
    parser = argparse.ArgumentParser(
        "accel monitor show-batch", description="Read the samples of a bad step again, from the loader of the script."
    )
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the first bad one)")
    parser.add_argument("--rank", type=int, metavar="R", help="the rank (default: the first with that step)")
    parser.add_argument(
        "--loader",
        required=True,
        metavar="FILE:NAME",
        help="a Python file, which is run, and a name in it: a loader, a data set, or a function that makes one",
    )
    arguments = parser.parse_args(list(argv))
    rank, event = _chosen_event(chosen_run(arguments.directory, arguments.run), arguments.step, arguments.rank)
    print(bad_step_sentence(event, rank))
    if not event["indices"]:
        raise ConfigurationError(
            f"the loader of step {event['step']} recorded no indices of its samples: it has no batch sampler, or "
            "iterable data. There is nothing to read again."
        )
    data = _data_set(arguments.loader)
    for index in event["indices"]:
        try:
            sample = data[index]
        except (IndexError, KeyError) as error:
            raise ConfigurationError(
                f"--loader {arguments.loader}: its data set has no sample {index} ({error!r}). Give that of the run."
            ) from error
        print(f"sample {index}")
        for name, text in described(sample):
            print(f"  {name}{text}")
    return 0


def _chosen_event(run: Run, step: int | None, rank: int | None) -> tuple[int, dict[str, Any]]:
    found = [
        (slot[1], event)
        for slot, attempts in sorted(run.attempts.items())
        for attempt in attempts
        for event in attempt.bad_steps
        if step in (None, event["step"]) and rank in (None, slot[1])
    ]
    if not found:
        known = sorted({event["step"] for of in run.attempts.values() for one in of for event in one.bad_steps})
        raise ConfigurationError(
            f"no such bad step{'' if step is None else f' {step}'} in {run.directory}. "
            + (f"There are: {', '.join(map(str, known))}." if known else "All losses and norms were in bounds.")
        )
    return min(found, key=lambda item: int(item[1]["step"]))


def _data_set(name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    if not file or not Path(file).is_file():
        raise ConfigurationError(
            f"--loader {name} must be FILE:NAME with a file that exists, such as train.py:make_loader."
        )
    names = runpy.run_path(file, run_name="accel_monitor_show_batch")
    if attribute not in names:
        raise ConfigurationError(
            f"--loader {name}: {file} has no {attribute!r}. Give a loader, a data set, or a function that makes one."
        )
    found = names[attribute]
    found = (
        found() if callable(found) and not hasattr(found, "__getitem__") and not hasattr(found, "dataset") else found
    )
    data = getattr(found, "dataset", found)
    if not hasattr(data, "__getitem__"):
        raise ConfigurationError(f"--loader {name} is a {type(data).__name__}, which has no samples by index.")
    return data


def described(sample: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the tensors and values of a sample: names, and shape, type and range of each."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from described(value, f"{name}{key}: ")
    elif isinstance(sample, (list, tuple)):
        for index, value in enumerate(sample):
            yield from described(value, f"{name}{index}: ")
    elif hasattr(sample, "dtype") and hasattr(sample, "shape"):
        import torch

        tensor = torch.as_tensor(sample)
        text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.numel() and not tensor.is_complex():
            values = tensor.double()
            bad = int((~values.isfinite()).sum())
            finite = values[values.isfinite()]
            if finite.numel():
                text += (
                    f", from {finite.min().item():.6g} to {finite.max().item():.6g}, mean {finite.mean().item():.6g}"
                )
            text += f", {bad} not finite" if bad else ""
        yield name, text
    else:
        shown = repr(sample)
        yield name, shown if len(shown) <= 200 else f"{shown[:200]}..."
