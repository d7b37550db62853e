"""Names and attributes that other libraries import, assign and call, although they are not documented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel.big_modeling
from accel import Accelerator
from accel.accelerator import AcceleratorState, ParallelismConfig, fsdp2_prepare_model, is_bf16_available
from accel.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accel.hooks import _accelerate_added_attributes
from accel.tracking import GeneralTracker
from accel.utils.modeling import logger
from accel_bigmodel.checkpoint import checkpoint_mapping
from accel_state import ConfigurationError, DistributedType, GradientAccumulationPlugin, PartialState


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_names_are_found_where_libraries_look() -> None:
    import accel.utils
    from accel.accelerator import convert_model_to_fp8_ao, get_state_dict_offloaded_model

    assert get_state_dict_offloaded_model is accel.utils.modeling.get_state_dict_offloaded_model

    assert AcceleratorState is accel.state.AcceleratorState and ParallelismConfig is accel.ParallelismConfig
    assert fsdp2_prepare_model is accel.utils.fsdp2_prepare_model
    assert convert_model_to_fp8_ao is accel.utils.convert_model_to_fp8_ao
    assert is_bf16_available() in (True, False)
    assert accel.data_loader.DataLoader is DataLoader  # finetrainers
    assert accel.tracking.logger.name == "accel.tracking"  # edsnlp
    assert logger is checkpoint_mapping.logger and _accelerate_added_attributes == []
    with pytest.raises(ImportError, match="no_such_name"):
        from accel.accelerator import no_such_name  # noqa: F401


def test_a_function_replaced_in_big_modeling_is_the_one_that_dispatch_model_calls() -> None:
    """Transformers skips the check of the map while it dispatches a model with weights that have no device."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    original = accel.big_modeling.check_device_map
    calls = []
    with pytest.raises(ConfigurationError, match="b.weight"):
        accel.big_modeling.dispatch_model(model, {"a": "cpu"}, force_hooks=True)
    try:
        accel.big_modeling.check_device_map = lambda *args: calls.append(args)
        accel.big_modeling.dispatch_model(model, {"a": "cpu"}, force_hooks=True)
    finally:
        accel.big_modeling.check_device_map = original
    assert len(calls) == 1
    with pytest.raises(ConfigurationError, match="b.weight"):
        accel.big_modeling.dispatch_model(model, {"a": "cpu"}, force_hooks=True)


def test_context_parallel_hooks_drop_the_mask_of_self_attention() -> None:
    class Attention(nn.Module):
        def forward(self, x: Any, attention_mask: Any = None, is_causal: bool = False) -> Any:
            return attention_mask, is_causal

    model = nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention()})
    accel.big_modeling._attach_context_parallel_hooks(model)
    assert model["self_attn"](1, attention_mask=2) == (None, True)
    assert model["self_attn"](1) == (None, False)
    assert model["cross_attn"](1, attention_mask=2) == (2, False)


def test_attributes_of_the_accelerator(accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(nn.Linear(2, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert not (accelerator.has_lomo_optimizer or accelerator.has_fp8_handler or accelerator.delayed_fp8_autocast)
    assert accelerator.te_recipe_handler is accelerator.ao_recipe_handler is accelerator.msamp_recipe_handler is None
    assert optimizer.accelerator_state.device == accelerator.device
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert accelerator.flag_tensor.item() == 1 and accelerator.check_trigger()
    assert accelerator.flag_tensor is None and not accelerator.check_trigger()
    accelerator._models = [model, model]
    assert len(accelerator._models) == 2 and accelerator._accumulation._prepared_models == [model, model]
    assert GradientAccumulationPlugin(2).to_dict() == {
        "num_steps": 2, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False
    }  # fmt: skip


def test_do_sync_counts_a_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    flags = []
    for _ in accelerator.prepare(DataLoader(list(range(5)), batch_size=1)):
        accelerator._do_sync()
        flags.append(accelerator.sync_gradients)
    assert flags == [False, True, False, True, True]


def test_trackers_can_be_replaced(tmp_path: Path) -> None:
    class Recorder(GeneralTracker):
        requires_logging_directory = False

        def __init__(self, name: str) -> None:
            self.name, self.values = name, []  # type: ignore[misc]
            super().__init__()

        @property
        def tracker(self) -> Any:
            return self.values

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.values.append(values)

    first, second = Recorder("first"), Recorder("second")
    accelerator = Accelerator(cpu=True, log_with=first, project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"a": 1})
    accelerator.trackers = [second]
    accelerator.log({"b": 2})
    assert accelerator.trackers == [second] and (first.values, second.values) == ([{"a": 1}], [{"b": 2}])
    accelerator.trackers = []
    accelerator.log({"c": 3})
    assert second.values == [{"b": 2}]
    accelerator.end_training()


def test_fields_of_the_state_can_be_set(accelerator: Accelerator) -> None:
    state = accelerator.state
    assert PartialState()._prepare_backend(cpu=True) == (None, DistributedType.NO)
    assert PartialState()._prepare_backend(True, False, "gloo") == ("gloo", DistributedType.NO)
    with pytest.raises(ConfigurationError, match="sagemaker_dp"):
        PartialState()._prepare_backend(sagemaker_dp=True)
    state.num_processes, state.process_index = 4, 3
    state.device = torch.device("meta")
    state.distributed_type = DistributedType.MULTI_CPU
    assert accelerator.num_processes == 4 and accelerator.process_index == 3 and accelerator.is_last_process
    assert accelerator.device.type == "meta" and accelerator.distributed_type == DistributedType.MULTI_CPU


def test_configuration_files_as_objects(tmp_path: Path) -> None:
    assert default_config_file.endswith("default_config.yaml")
    config = ClusterConfig(compute_environment="LOCAL_MACHINE", num_processes=2, mixed_precision="bf16")
    for name in ("config.yaml", "config.json"):
        config.to_yaml_file(tmp_path / name)
        again = load_config_from_file(tmp_path / name)
        assert again.num_processes == 2 and again.to_dict()["mixed_precision"] == "bf16"
    assert json.loads((tmp_path / "config.json").read_text())["num_processes"] == 2
    shown = subprocess.run(
        [sys.executable, "-m", "accel.commands.config", "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: accel config" in shown.stdout
