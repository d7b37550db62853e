"""The settings, and what is said where something is missing. Needs no Megatron-core."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from accel_megatron import MegatronLMPlugin
from accel_state.errors import ConfigurationError


def test_values_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TP_DEGREE": "2",
        "PP_DEGREE": "4",
        "GRADIENT_CLIPPING": "0.5",
        "NUM_MICRO_BATCHES": "8",
    }.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    monkeypatch.setenv("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true")
    plugin = MegatronLMPlugin(pp_degree=2)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (2, 2, 8)
    assert plugin.gradient_clipping == 0.5
    assert plugin.use_distributed_optimizer is True


def test_defaults() -> None:
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches, plugin.gradient_clipping) == (1, 1, 1, 1.0)
    plugin.set_training_args(4, 2)
    assert (plugin.micro_batch_size, plugin.global_batch_size) == (4, 8)


def fsdp(**other: Any) -> dict[str, Any]:
    return {"other_megatron_args": {"use_megatron_fsdp": True, **other}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_degree": 0}, "tp_degree=0"),
        ({"use_custom_fsdp": True, "pp_degree": 2}, "use_custom_fsdp=True .* pp_degree=2"),
        ({"use_custom_fsdp": True, "optimizer_cpu_offload": True}, "use_custom_fsdp=True.*optimizer_cpu_offload=True"),
        (fsdp(data_parallel_sharding_strategy="no_shard"), "'no_shard' is not one of optim"),
        (fsdp(data_parallel_sharding_strategy="optim", overlap_grad_reduce=True), "overlap_grad_reduce=True .*'optim'"),
        (fsdp(grad_reduce_in_fp32=False), "use_custom_fsdp=True.*'grad_reduce_in_fp32': False.*Leave it out"),
        ({"other_megatron_args": {"data_parallel_sharding_strategy": "optim"}}, "Set use_custom_fsdp=True"),
        ({"other_megatron_args": {"use_torch_fsdp2": True}}, "use_torch_fsdp2.*Use use_custom_fsdp=True"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "overlap_cpu_optimizer_d2h_h2d=True.*optimizer_cpu_offload"),
        ({"encoder_seq_length": 0}, "encoder_seq_length=0 is not a number of tokens"),
        ({"custom_prepare_model_function": print}, "custom_prepare_model_function prepares.*Set both"),
        ({"tensorboard_dir": "runs"}, "tensorboard_dir='runs'.*log_with"),
        ({"attention_backend": "flash"}, "attention_backend='flash'.*sdpa_kernel"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "pp_degree=1"),
        ({"recompute_granularity": "some"}, "recompute_granularity='some'.*full, selective"),
    ],
)
def test_values_that_are_not_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(**arguments)


def test_fsdp_has_two_names_and_includes_the_distributed_optimizer() -> None:
    for plugin in (MegatronLMPlugin(use_custom_fsdp=True), MegatronLMPlugin(**fsdp())):
        assert plugin.use_custom_fsdp and plugin.use_distributed_optimizer
        assert plugin.sharding_strategy == "optim_grads_params"
    assert MegatronLMPlugin().sharding_strategy is None


def test_sizes_that_do_not_fit_the_processes() -> None:
    with pytest.raises(ConfigurationError, match="6 processes.*tp_degree=2.*pp_degree=2"):
        MegatronLMPlugin(tp_degree=2, pp_degree=2).check_world(6)
    with pytest.raises(ConfigurationError, match="expert_model_parallel_size=4"):
        MegatronLMPlugin(tp_degree=2, expert_model_parallel_size=4).check_world(4)
    with pytest.raises(
        ConfigurationError, match=r"2 processes / \(.*expert_model_parallel_size=2\) .*Launch 4 processes"
    ):
        MegatronLMPlugin(use_custom_fsdp=True, expert_model_parallel_size=2).check_world(2)


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, accel_megatron; print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    assert run(code).strip() == "[]"


def run(code: str) -> str:
    """What a script prints in a new interpreter, which finds this package where this one does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return result.stdout + result.stderr


def without(module: str, code: str) -> str:
    """What a script prints where a module is not installed."""
    return run(f"import sys; sys.modules[{module!r}] = None\n{code}")


def test_messages_without_the_packages() -> None:
    message = without("accel_megatron", "from accel.utils import MegatronLMPlugin")
    assert "accel.utils.MegatronLMPlugin needs the module accel_megatron" in message
    assert "pip install 'accel[megatron]'" in message
    message = without(
        "megatron.core", "import accel_megatron; accel_megatron.MegatronEngine(None, None, None, 'no', None)"
    )
    assert "training with Megatron-LM needs the module megatron.core" in message
    assert "pip install 'accel[megatron]'" in message
