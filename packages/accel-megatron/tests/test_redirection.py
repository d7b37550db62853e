"""The redirection for tests replaces names that exist."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("megatron", reason="scripts/test-megatron makes an environment with Megatron-core")

CODE = """
from accel_megatron.testing import replacements
missing = [f"{module}.{name}" for module, name, _ in replacements() if not hasattr(module, name)]
print(missing)
from accel_megatron import _megatron_compat
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
print(hasattr(DistributedOptimizer, "_get_model_param_range_map"))
"""


def test_every_replaced_name_exists() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "True"], result.stderr


def test_doctor_says_which_kernels_are_missing() -> None:
    from accel_launch.doctor.machine import check_versions

    found = {result.subject: result for result in check_versions()}["megatron"]
    for name in ("transformer_engine", "apex"):
        assert (f"{name} (" in found.text) == (find_spec(name) is None), found
