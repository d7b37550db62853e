"""Small models of many architectures with offloaded weights, compared with the plain model.

    python benchmarks/bigmodel_architectures.py                        all of them
    python benchmarks/bigmodel_architectures.py --only gpt2 t5
    python benchmarks/bigmodel_architectures.py --draw 6 --seed 3      some of them

Each model is offloaded in the ways below. Its forward, and greedy generation with a cache where it can generate, must
give what the plain model gives, twice:

    cpu      cpu_offload
    disk     disk_offload
    map      dispatch_model with every other part on the disk, the rest on the CPU
    load     the same map, by load_checkpoint_and_dispatch from what save_pretrained wrote
    threads  four threads share a model after cpu_offload, each with inputs of its own

The exit code is 1 unless all are equal. Parameters are perturbed, because many models begin with zeros that hide what
is missing. A row whose plain model fails, differs from itself when it runs twice, or is not finite is a mistake of this
program, and also makes the exit code 1. Of a model that four threads cannot share although its weights are not
offloaded, "threads" says so and does not count.

Rows run in forked processes, because a weight that is read without its values may crash one. Libraries that are not
installed are left out. The whole table takes about 10 minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from _architectures import ARCHITECTURES, Architecture
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accel_state.errors import AccelError

EQUAL, NOT_SHARED = "equal", "plain differs"
TOLERANCE = 1e-5  # of the largest value of a tensor
THREADS, ROUNDS, NEW_TOKENS = 4, 2, 5
ROW_SECONDS = 300
Call = Callable[[nn.Module, int], list[torch.Tensor]]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output, nested as libraries nest them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_of(getattr(value, item.name))


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Return "" if outputs are equal, else how they differ."""
    if [item.shape for item in found] != [item.shape for item in expected]:
        return f"shapes {[tuple(item.shape) for item in found]}"
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if not one.is_floating_point():
            wrong = int((one != other).sum())
            if wrong:
                return f"{wrong} of {one.numel()} differ"
            continue
        error = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        scale = other.abs().max().item() if one.numel() else 0.0
        if not error <= TOLERANCE * scale:  # also if it is not a number
            largest = max(largest, error) if error == error else float("nan")
    return f"error {largest:.1e}" if largest else ""


def calls_of(architecture: Architecture, model: nn.Module) -> dict[str, Call]:
    """Return what to call a model with: the number of a call determines its inputs."""

    def inputs(number: int) -> dict[str, Any]:
        return architecture.inputs(torch.Generator().manual_seed(number))

    @torch.no_grad()
    def forward(model: nn.Module, number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        return [item.clone() for item in tensors_of(model(**inputs(number)))]

    @torch.no_grad()
    def generate(model: Any, number: int) -> list[torch.Tensor]:
        prompt = {name: value for name, value in inputs(number).items() if not name.startswith("decoder_")}
        return [model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)]

    calls = {"forward": forward}
    if hasattr(model, "can_generate") and model.can_generate():
        calls["generate"] = generate
    return calls


def parts_of(model: nn.Module, name: str = "", depth: int = 3) -> Iterator[str]:
    """Yield names for a device map that together cover a model: blocks, and what lies beside them."""
    no_split = set(getattr(model, "_no_split_modules", None) or ())

    def walk(module: nn.Module, prefix: str, depth: int) -> Iterator[str]:
        children = dict(module.named_children())
        if prefix and (not children or not depth or type(module).__name__ in no_split):
            yield prefix
            return
        start = f"{prefix}." if prefix else ""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        yield from (start + name for name, _ in own)
        for name, child in children.items():
            if any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
                yield from walk(child, start + name, depth - 1)

    yield from walk(model, name, depth)


def half_on_disk(model: nn.Module) -> dict[str, str]:
    """Return a device map with every other part on the disk."""
    return {name: ("disk", "cpu")[index % 2] for index, name in enumerate(parts_of(model))}


def plain_model(architecture: Architecture, seed: int) -> nn.Module:
    """Build a model whose parameters are all different from those of its initialization."""
    torch.manual_seed(seed)
    model = architecture.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def loaded(architecture: Architecture, plain: Any, folder: Path) -> nn.Module:
    """Save a model, and load it with half of it on the disk."""
    checkpoint = folder / "checkpoint"
    if getattr(plain, "_keys_to_ignore_on_save", None):  # such as positions that are computed, but perturbed here
        checkpoint = folder / "pytorch_model.bin"
        torch.save(plain.state_dict(), checkpoint)
    else:
        plain.save_pretrained(checkpoint)
    with init_empty_weights():
        model = architecture.build()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return load_checkpoint_and_dispatch(model, checkpoint, half_on_disk(plain), offload_folder=folder / "load")


def in_threads(model: nn.Module, call: Call) -> list[list[list[torch.Tensor]]]:
    """Return what each of four threads got in each round."""
    barrier = threading.Barrier(THREADS)
    results: list[list[list[torch.Tensor]]] = [[] for _ in range(THREADS)]
    errors: list[BaseException] = []

    def serve(number: int) -> None:
        barrier.wait()
        try:
            for _ in range(ROUNDS):
                results[number].append(call(model, number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return results


class Row:
    """The plain model of an architecture, and its comparison with offloaded ones."""

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self.architecture = architecture
        self.plain = plain_model(architecture, seed)
        self.calls = calls_of(architecture, self.plain)
        self.expected = {name: [call(self.plain, n) for n in range(THREADS)] for name, call in self.calls.items()}
        self._check_plain()

    def _check_plain(self) -> None:
        for name, call in self.calls.items():
            again = call(self.plain, 0)
            if not again or any(not torch.equal(*pair) for pair in zip(again, self.expected[name][0], strict=True)):
                raise RuntimeError(f"the plain model's {name} gives something else when it is repeated")
            if any(item.is_floating_point() and not item.isfinite().all() for item in again):
                raise RuntimeError(f"the plain model's {name} is not finite")

    def one_thread(self, model: nn.Module) -> str:
        """Compare every call, repeated, with the plain model's."""
        for name, call in self.calls.items():
            for turn in range(ROUNDS):
                text = difference(call(model, turn), self.expected[name][turn])
                if text:
                    return f"{name}: {text}"
        return EQUAL

    def four_threads(self, model: nn.Module) -> str:
        """Compare the calls of four threads with those of the plain model."""
        for name, call in self.calls.items():
            for number, results in enumerate(in_threads(model, call)):
                for result in results:
                    text = difference(result, self.expected[name][number])
                    if text:
                        return f"{name}: {text}"
        return EQUAL

    def verdicts(self, folder: Path) -> dict[str, str]:
        """Return the verdict on each way to offload."""
        copied = copy.deepcopy
        ways: dict[str, Callable[[], str]] = {
            "cpu": lambda: self.one_thread(cpu_offload(copied(self.plain), "cpu")),
            "disk": lambda: self.one_thread(disk_offload(copied(self.plain), folder / "disk", "cpu")),
            "map": lambda: self.one_thread(
                dispatch_model(copied(self.plain), half_on_disk(self.plain), offload_dir=folder / "map")
            ),
            "load": lambda: self.one_thread(loaded(self.architecture, self.plain, folder)),
            "threads": lambda: self.four_threads(cpu_offload(copied(self.plain), "cpu")),
        }
        found = {name: verdict_of(way) for name, way in ways.items()}
        if found["threads"] != EQUAL and verdict_of(lambda: self.four_threads(copied(self.plain))) != EQUAL:
            found["threads"] = NOT_SHARED
        return found


WAYS = ("cpu", "disk", "map", "load", "threads")


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def verdict_of(way: Callable[[], str]) -> str:
    """Run a comparison; an error is a verdict too."""
    try:
        return way()
    except AccelError as error:
        return f"refused {first_line(error)}"
    except Exception as error:
        return f"raised {first_line(error)}"


def _compare(architecture: Architecture, seed: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        row = Row(architecture, seed)
        with tempfile.TemporaryDirectory() as folder:
            results.put((list(row.calls), row.verdicts(Path(folder))))
    except Exception as error:
        results.put(([], {"plain": f"raised {first_line(error)}"}))


def compare(architecture: Architecture, seed: int) -> tuple[list[str], dict[str, str]]:
    """Compare an architecture in a process of its own; return the calls and the verdict on each way to offload."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_compare, args=(architecture, seed, results))
    process.start()
    process.join(ROW_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return [], {"plain": f"hung for {ROW_SECONDS} s"}
    return ([], {"plain": f"exit code {process.exitcode}"}) if results.empty() else results.get()


def is_right(verdicts: Mapping[str, str]) -> bool:
    """True if all verdicts are equal, or the plain model cannot be shared by threads either."""
    return all(text == EQUAL or (way == "threads" and text == NOT_SHARED) for way, text in verdicts.items())


def selected(options: argparse.Namespace) -> list[Architecture]:
    """Return the architectures of the command line whose library is installed."""
    names = {architecture.name for architecture in ARCHITECTURES}
    unknown = set(options.only or ()) - names
    if unknown:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: not one of {' '.join(sorted(names))}")
    found = [item for item in ARCHITECTURES if not options.only or item.name in options.only]
    present = [item for item in found if item.is_installed()]
    if len(present) < len(found):
        print(f"{len(found) - len(present)} architectures are left out: their library is not installed")
    if options.draw:
        present = random.Random(options.seed).sample(present, min(options.draw, len(present)))
    return present


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 0 if all are equal."""
    parser = argparse.ArgumentParser(description="Compare offloaded models of many architectures with plain ones.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--draw", type=int, metavar="N", help="N of them, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, and of each model (default: 0)")
    options = parser.parse_args(arguments)
    architectures = selected(options)
    for library in {architecture.library for architecture in architectures}:
        __import__(library)
    print(line("architecture", "calls", WAYS))
    print(line("-" * 28, "-" * 17, ["-" * 7] * len(WAYS)))
    notes, right = [], 0
    counts: Counter[str] = Counter()
    for architecture in architectures:
        calls, verdicts = compare(architecture, options.seed)
        right += is_right(verdicts)
        cells = [short(verdicts.get(way, "-")) for way in WAYS]
        counts.update(cells)
        print(line(architecture.name, ", ".join(calls), cells), flush=True)
        notes += [f"{architecture.name}, {way}: {text}" for way, text in verdicts.items() if text != EQUAL]
    print("\n".join(["", *notes, ""] if notes else [""]))
    cells = [f"{count} {word}" for word, count in counts.items()]
    print(f"{right} of {len(architectures)} architectures are equal ({', '.join(cells)})")
    return 0 if right == len(architectures) else 1


def line(name: str, calls: str, cells: Sequence[str]) -> str:
    """Return a row of the table."""
    return f"| {name:28} | {calls:17} | " + " | ".join(f"{cell:7}" for cell in cells) + " |"


def short(verdict: str) -> str:
    """Return the word of a verdict for the table."""
    if verdict in (EQUAL, NOT_SHARED, "-"):
        return {NOT_SHARED: "(plain)"}.get(verdict, verdict)
    word = verdict.split()[0]
    return word if word in ("refused", "raised") else "differs"


if __name__ == "__main__":
    sys.exit(main())
