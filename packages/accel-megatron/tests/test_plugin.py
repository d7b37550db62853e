"""The settings, and what is said where something is missing. Needs no Megatron-core."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_degree": 0}, "tp_degree=0"),
        ({"use_custom_fsdp": True}, "use_custom_fsdp=True.*FullyShardedDataParallelPlugin"),
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


def test_sizes_that_do_not_fit_the_processes() -> None:
    with pytest.raises(ConfigurationError, match="6 processes are not a multiple of tp_degree=2 x pp_degree=2"):
        MegatronLMPlugin(tp_degree=2, pp_degree=2).check_world(6)
    with pytest.raises(ConfigurationError, match="expert_model_parallel_size=4"):
        MegatronLMPlugin(tp_degree=2, expert_model_parallel_size=4).check_world(4)


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, accel_megatron; print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def without(module: str, code: str) -> str:
    """What a script prints where a module is not installed."""
    script = f"import sys; sys.modules[{module!r}] = None\n{code}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def test_messages_without_the_packages() -> None:
    message = without("accel_megatron", "from accel.utils import MegatronLMPlugin")
    assert "accel.utils.MegatronLMPlugin needs the module accel_megatron" in message
    assert "pip install 'accel[megatron]'" in message
    message = without(
        "megatron.core", "import accel_megatron; accel_megatron.MegatronEngine(None, None, None, 'no', None)"
    )
    assert "training with Megatron-LM needs the module megatron.core" in message
    assert "pip install 'accel[megatron]'" in message
