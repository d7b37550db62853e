"""Which optional packages are installed: agreed with pip's own record, without importing them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_state import imports

CHECKS: dict[str, Callable[[], bool]] = {
    name: check
    for name, check in vars(imports).items()
    if name.endswith("_available") and name != "is_package_available"
}
# What a name stands for where it is not the module's own.
MODULES = {
    "is_tensorboard_available": ("tensorboard", "tensorboardX"),
    "is_lomo_available": ("lomo_optim",),
    "is_ipex_available": ("intel_extension_for_pytorch",),
    "is_torchdata_stateful_dataloader_available": ("torchdata",),
    "is_bnb_available": ("bitsandbytes",),
    "is_8bit_bnb_available": ("bitsandbytes",),
    "is_4bit_bnb_available": ("bitsandbytes",),
    "is_bitsandbytes_multi_backend_available": ("bitsandbytes",),
    "is_megatron_lm_available": ("megatron",),
    "is_fp8_available": ("torchao", "transformer_engine", "msamp"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_agrees_with_the_import_system(name):
    modules = MODULES.get(name, (name.removeprefix("is_").removesuffix("_available"),))
    found = CHECKS[name]()
    assert isinstance(found, bool)
    assert found == any(importlib.util.find_spec(module) is not None for module in modules)
    assert inspect.getdoc(CHECKS[name])


def test_importing_and_looking_import_and_change_nothing():
    """One interpreter for all: what its first half must not import stays imported."""
    code = """
        import os, sys, threading
        import psutil
        variables, cores = dict(os.environ), psutil.Process().cpu_affinity()
        import accel_state.env, accel_state.numa
        from accel_state import environments, imports, options
        options.load_groups(), environments.detect()
        assert not {"torch", "yaml"} & set(sys.modules)
        for name in [name for name in vars(imports) if name.endswith("_available") and name != "is_package_available"]:
            # This one says in its docstring that it imports; it has no other way to know.
            if name != "is_bitsandbytes_multi_backend_available":
                vars(imports)[name]()
        loaded = {"torch", "transformers", "pandas", "datasets", "wandb", "pytest", "numpy", "bitsandbytes"}
        loaded &= set(sys.modules)
        # The parent of a dotted name is imported, where it is installed.
        assert loaded <= ({"torch", "numpy"} if "torchdata" in sys.modules else set()), loaded
        assert dict(os.environ) == variables and psutil.Process().cpu_affinity() == cores

        import random
        import numpy as np, torch
        def seed_and_draw(between):
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            between()
            return random.random(), np.random.rand(), torch.rand(1).item()
        assert seed_and_draw(lambda: __import__("accel_state.random")) == seed_and_draw(lambda: None)
        from accel_state import devices
        devices.detect(), devices.available()
        assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()
        assert threading.active_count() == 1
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=110, env=environment)


def test_installed_and_not():
    assert imports.is_numpy_available()
    assert imports.is_numpy_available("1.25.0")
    assert not imports.is_numpy_available("999")
    assert imports.is_pytest_available()
    assert not imports.is_package_available("no_such_package")
    assert not imports.is_package_available("no_such_package.inner")
    assert not imports.is_package_available("pytest.no_such_module")


def test_a_folder_is_not_a_package(tmp_path, monkeypatch):
    # wandb and mlflow write their runs into folders of these names.
    (tmp_path / "tracker_runs" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("tracker_runs") is not None
    assert not imports.is_package_available("tracker_runs")


def write_package(folder: Path, version: str | None) -> None:
    (folder / "gadget").mkdir()
    (folder / "gadget" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    if version is not None:
        info = folder / "gadget-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gadget\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "minimum", "expected"),
    [
        ("1.5", None, True),
        ("1.5", "1.5", True),
        ("1.5", "1.10", False),
        ("2.0rc1", "2.0", False),
        (None, None, True),
        (None, "1.0", False),
    ],
)
def test_versions(tmp_path, monkeypatch, version, minimum, expected):
    write_package(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imports.is_package_available("gadget", min_version=minimum) is expected


def test_everything_but_numpys_generator_works_without_numpy(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["numpy"] = None  # importing it raises ModuleNotFoundError
import torch
from accel_state import MissingDependencyError, PartialState, set_seed, synchronize_rng_state
from accel_state import operations, safetensors_writer, splitting, testing
from accel_state.collectives import torch as collectives
set_seed(5)
assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
assert splitting.share_of([1, 2, 3], 1, 2, apply_padding=True) == [3, 3]
assert splitting.share_of(torch.arange(3), 0, 2).tolist() == [0, 1]
value = {{"a": [1, (2, "three")], "b": torch.arange(5)}}
back = collectives._from_bytes(collectives._to_bytes(value))
assert back["a"] == value["a"] and torch.equal(back["b"], value["b"])
with open({str(tmp_path / "file")!r}, "wb") as file:
    safetensors_writer.write_safetensors({{"a": torch.arange(6.0)[2:], "b": torch.ones(2, 2).bfloat16()}}, file)
PartialState(cpu=True)
try:
    synchronize_rng_state("numpy")
except MissingDependencyError as error:
    assert "pip install 'numpy'" in str(error)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    import torch
    from safetensors.torch import load_file

    written = load_file(tmp_path / "file")
    assert written["a"].tolist() == [2.0, 3.0, 4.0, 5.0] and torch.equal(written["b"], torch.ones(2, 2).bfloat16())
