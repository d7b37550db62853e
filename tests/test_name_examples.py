"""Every name of the reference has an example, and the examples print what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import call_alone
from run_name_examples import failures_of
from workspace import ROOT

from accel_state.testing import WorldError

sys.path.insert(0, str(ROOT / "docs"))
try:
    from exports import _exports
    from name_examples import FOLDER, docstring, examples, resolve
finally:
    sys.path.pop(0)

# Base classes, records and functions that users get from others, or that libraries import and users do not call.
WITHOUT = set(
    """
accel_bigmodel.inference.Pipeline
accel_bigmodel.inference.pippy_forward
accel_data.adapter.DataLoaderStateMixin
accel_fp8.backends.base.Backend
accel_fp8.scaling.Float8Format
accel_fp8.scaling.matmul_error_bound
accel_fp8.scaling.rounding_error_bound
accel_megatron.architectures.base.Architecture
accel_megatron.engine.MegatronOutput
accel_megatron.strategy.MegatronStrategy
accel_megatron.train_step.AbstractTrainStep
accel_megatron.train_step.BertTrainStep
accel_megatron.train_step.GPTTrainStep
accel_megatron.train_step.T5TrainStep
accel_megatron.train_step.avg_losses_across_data_parallel_group
accel_megatron.train_step.gather_across_data_parallel_groups
accel_megatron.weights.Weight
accel_quant.quantizers.base.Quantizer
accel_track.base.Silence
""".split()
)


def public() -> dict[str, Any]:
    """The classes and functions of the reference, and the methods of the Accelerator, by where they are defined."""
    text = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/**/*.md"))
    found = {}
    for module in set(re.findall(r"<!-- (?:exports|index): ([\w.]+) -->", text)):
        source = importlib.import_module(module)
        names = source.__all__ if module == "accel.utils" else _exports(ROOT, module)[0]
        for value in (getattr(source, name) for name in names if not re.fullmatch(r"is_\w+_available", name)):
            if (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("accel"):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    accelerator = importlib.import_module("accel").Accelerator
    for name, value in inspect.getmembers(accelerator, inspect.isfunction):
        if not name.startswith("_"):
            owner = next(base for base in accelerator.__mro__ if name in vars(base))
            found[f"{owner.__module__}.{owner.__qualname__}.{name}"] = value
    return found


def test_every_name_has_an_example() -> None:
    names = public()
    documented = {name for name, value in names.items() if ">>>" in (inspect.getdoc(value) or "")} | set(examples())
    assert set(names) - documented == WITHOUT, "write an example in docs/name_examples"
    for example in examples().values():
        for line in doctest.DocTestParser().get_examples(example.text + "\n"):
            compile(line.source, example.name, "single")


def sections_missing(name: str, value: Any) -> list[str]:
    """The sections that the docstring of a class or function should have and has not."""
    text = docstring(name)
    described = set(re.findall(r"^ {4}\*{0,2}(\w+): ", text, re.MULTILINE))
    signature = inspect.signature(value)
    parameters = {parameter for parameter in signature.parameters if parameter != "self"}
    missing = [f"Args: {parameter}" for parameter in sorted(parameters - described)]
    if not inspect.isclass(value) and signature.return_annotation not in (None, "None"):
        missing += [] if re.search(r"^(Returns|Yields):$", text, re.MULTILINE) else ["Returns"]
    missing += [section for section in ("Raises", "Examples") if not re.search(rf"^{section}:$", text, re.MULTILINE)]
    return missing


def test_docstrings_of_the_most_used_names_have_all_sections() -> None:
    shown = [example for example in examples().values() if example.in_docstring]
    assert len(shown) >= 40
    incomplete = {example.name: sections_missing(example.name, resolve(example.name)[-1]) for example in shown}
    assert not {name: missing for name, missing in incomplete.items() if missing}
    assert all(example.runs and ">>> " in example.text for example in shown)


@pytest.mark.slow  # 300 examples, in a process for each package
@pytest.mark.timeout(400)
def test_examples_print_what_they_show(tmp_path: Path) -> None:
    failures = []
    for file in sorted(FOLDER.glob("*.txt")):
        try:
            failures += call_alone(failures_of, file, tmp_path, seconds=120)
        except WorldError as error:
            failures.append(f"{file.name}: {error}")
    assert not failures, "\n".join(failures)
