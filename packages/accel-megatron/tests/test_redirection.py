"""The redirection for tests replaces names that exist."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from accel_state.testing import run_world

pytest.importorskip("megatron", reason="scripts/test-megatron makes an environment with Megatron-core")


def missing_names() -> list[str]:
    """In a process that has replaced nothing yet."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    import accel_megatron._megatron_compat  # noqa: F401
    from accel_megatron.testing import replacements

    missing = [f"{module}.{name}" for module, name, _ in replacements() if not hasattr(module, name)]
    replaced_by_accel = "_get_model_param_range_map"
    return missing + [replaced_by_accel] * (not hasattr(DistributedOptimizer, replaced_by_accel))


def test_every_replaced_name_exists() -> None:
    assert run_world(missing_names, 1, state=False) == [[]]


def test_doctor_says_which_kernels_are_missing() -> None:
    from accel_launch.doctor.machine import check_versions

    found = {result.subject: result for result in check_versions()}["megatron"]
    for name in ("transformer_engine", "apex"):
        assert (f"{name} (" in found.text) == (find_spec(name) is None), found
