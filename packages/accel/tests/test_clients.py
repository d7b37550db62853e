"""What other libraries (Transformers, TRL, PEFT, diffusers) expect of an Accelerator and of what it has prepared."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel.big_modeling
from accel import Accelerator, AutocastKwargs
from accel.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accel.commands.launch import launch_command, launch_command_parser
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.hooks import _accelerate_added_attributes
from accel.state import AcceleratorState, GradientState, PartialState
from accel.tracking import GeneralTracker
from accel.utils.dataclasses import get_module_class_from_name
from accel.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from accel.utils.modeling import logger
from accel.utils.random import set_seed
from accel_bigmodel.checkpoint import checkpoint_mapping
from accel_launch.errors import LaunchError
from accel_state import ConfigurationError, DistributedType, GradientAccumulationPlugin


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def loop_objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any) -> None:
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


# The mark of prepared objects


def test_prepared_objects_are_marked_and_pass_through_another_prepare(accelerator: Accelerator) -> None:
    objects = loop_objects()
    assert not any(hasattr(obj, "_is_accelerate_prepared") for obj in objects)
    prepared = accelerator.prepare(*objects)
    assert all(obj._is_accelerate_prepared is True for obj in prepared)
    accelerator.free_memory()
    again = accelerator.prepare(*prepared)
    assert all(first is second for first, second in zip(again, prepared, strict=True))
    assert (accelerator._models, accelerator._dataloaders) == ([prepared[0]], [prepared[2]])
    assert (accelerator._optimizers, accelerator._schedulers) == ([prepared[1]], [prepared[3]])
    train(accelerator, *again)
    assert accelerator.prepare(None, ()) == (None, ())
    with pytest.raises(ConfigurationError, match="2 values for 1 objects"):
        accelerator.prepare(prepared[0], device_placement=[True, False])


def test_an_object_with_the_mark_is_not_changed() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, loader, scheduler = loop_objects()
    for obj in (model, optimizer, loader, scheduler):
        obj._is_accelerate_prepared = True  # type: ignore[union-attr]
    forward = model.forward
    assert accelerator.prepare(model, optimizer, loader, scheduler) == (model, optimizer, loader, scheduler)
    assert model.forward == forward and accelerator._dataloaders == [loader]
    accelerator.prepare(model)
    assert accelerator._models == [model]


def test_a_wrapper_around_a_prepared_model_is_prepared(accelerator: Accelerator) -> None:
    class Forwarding(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    inner = accelerator.prepare(nn.Linear(2, 1))
    outer = Forwarding(inner)
    assert accelerator.prepare(outer) is outer
    assert accelerator._models == [inner, outer] and "_is_accelerate_prepared" in vars(outer)


# Lifetime and pickles


def test_a_dropped_accelerator_is_freed_at_once() -> None:
    def use() -> tuple[weakref.ref[Accelerator], Any]:
        accelerator = Accelerator(cpu=True)
        objects = accelerator.prepare(*loop_objects())
        train(accelerator, *objects)
        return weakref.ref(accelerator), objects

    use()  # imports, whose frames refer to what was in them
    gc.collect()
    gc.disable()
    try:
        reference, objects = use()
        iterator = iter(objects[2])
        next(iterator)
        assert reference() is None, "no reference cycle, and prepared objects do not hold it"
        loader = weakref.ref(objects[2])
        del objects, iterator
        assert loader() is None
    finally:
        gc.enable()


def test_an_accelerator_can_be_pickled(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",  # with a scaler
        gradient_accumulation_steps=3,
        log_with="jsonl",
        project_dir=tmp_path,
        save_on_signal=True,
    )
    accelerator.init_trackers("run")
    objects = accelerator.prepare(*loop_objects())
    model, _, loader, _ = objects
    accelerator.save_state(tmp_path / "state", blocking=False)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
        copied, *prepared = pickle.loads(pickle.dumps((accelerator, *objects)))
        break
    assert copied.state.mixed_precision == "fp16" and copied.gradient_accumulation_steps == 3
    assert copied.device == accelerator.device and copied.preemption is None
    assert copied._models[0] is prepared[0] and copied._optimizers[0] is prepared[1]
    assert copied.step == accelerator.step
    train(copied, *prepared)
    copied.log({"nothing": 1.0})
    accelerator.end_training()


def test_the_states_can_be_pickled_and_belong_to_the_process_that_loads_them() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for state in (accelerator.state, PartialState(), GradientState()):
        for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
            assert type(copied) is type(state) and vars(copied) is vars(state)
    pickled = pickle.dumps(accelerator.state)
    del accelerator
    AcceleratorState._reset_state()
    assert pickle.loads(pickled).mixed_precision == "bf16"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)


def test_parameters_of_modules_given_as_objects_or_by_a_pattern() -> None:
    model = Blocks()
    weights = set(model.layers[0].parameters())
    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_parameters_from_modules([model.layers[0]], model, "cpu") == weights
    assert get_parameters_from_modules(r"layers\.0|head", model, "cpu") == weights | set(model.head.parameters())
    assert {weight.device.type for weight in get_parameters_from_modules("head", model, "meta")} == {"meta"}


def test_the_wrap_policy_says_which_modules_are_sharded_on_their_own() -> None:
    model = Blocks()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    chooses = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert chooses is not None
    assert [name for name, module in model.named_modules() if chooses(module)] == ["layers.0", "layers.1"]
    nothing = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    assert fsdp2_prepare_auto_wrap_policy(nothing, model) is None


def test_classes_of_submodules_by_name() -> None:
    model = Blocks()
    assert get_module_class_from_name(model, "Block") is Block
    assert get_module_class_from_name(model, "Blocks") is Blocks
    assert get_module_class_from_name(model, "Missing") is None


def test_trackers_by_name() -> None:
    from accel.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker

    assert LOGGER_TYPE_TO_CLASS["tensorboard"] is TensorBoardTracker
    assert {"wandb", "mlflow", "jsonl"} <= set(LOGGER_TYPE_TO_CLASS) and "all" not in LOGGER_TYPE_TO_CLASS
    assert len(LOGGER_TYPE_TO_CLASS) == len(list(LOGGER_TYPE_TO_CLASS))


def test_a_script_is_launched_from_a_namespace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('got', sys.argv[1:]); sys.exit(int(sys.argv[2]))")
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "1", str(script), "--lr", "0"])
    assert int(args.num_processes) == 1 and args.mixed_precision is None
    assert args.training_script == str(script) and args.training_script_args == ["--lr", "0"]
    args.num_processes, args.cpu, args.debug = 1, True, False
    launch_command(args)
    assert "got ['--lr', '0']" in capfd.readouterr().out
    args.training_script_args = ["--lr", "3"]
    with pytest.raises(LaunchError, match="failed with exit code 3") as failed:
        launch_command(args)
    assert isinstance(failed.value, subprocess.CalledProcessError) and failed.value.returncode == 3
    args.multi_gpu = True
    with pytest.raises(ValueError, match="contradict each other"):
        launch_command(args)
    with pytest.raises(SystemExit, match="2"):
        launch_command_parser().parse_args(["--no_such_flag", str(script)])
    assert "error: --no_such_flag is not an option" in capfd.readouterr().err
    parser = argparse.ArgumentParser()
    launch_command_parser(parser.add_subparsers())
    assert parser.parse_args(["launch", "--cpu", str(script)]).func is launch_command


# Names and attributes that are not documented, and which libraries import, assign and call all the same


def test_names_are_found_where_libraries_look() -> None:
    assert accel.data_loader.DataLoader is DataLoader  # finetrainers
    assert accel.tracking.logger.name == "accel.tracking"  # edsnlp
    assert logger is checkpoint_mapping.logger and _accelerate_added_attributes == []


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


# Attributes, and arguments of the wrong type


def test_the_step_can_be_set_and_handlers_read() -> None:
    autocast = AutocastKwargs(cache_enabled=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, kwargs_handlers=[autocast])
    assert accelerator.autocast_handler is autocast and not accelerator.fp8_enabled
    names = ("ddp_handler", "scaler_handler", "init_handler", "profile_handler", "fp8_recipe_handler")
    assert [getattr(accelerator, name) for name in names] == [None] * len(names)
    model, *_ = accelerator.prepare(*loop_objects())
    with accelerator.accumulate(model):
        assert accelerator.step == 1
        accelerator.step = 2
        assert accelerator.step == 2
    accelerator.step = 0
    synchronised = []
    for _ in range(3):
        with accelerator.accumulate(model):
            synchronised.append(accelerator.sync_gradients)
    assert synchronised == [False, False, True], "the window began again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"project_config": "runs"}, "For a directory, pass project_dir='runs'"),
        ({"rng_types": "numpy"}, r"must be a list: rng_types=\['numpy'\]"),
        ({"dataloader_config": {"split_batches": True}}, r"is a dict. Pass DataLoaderConfiguration\(\*\*settings\)"),
    ],
)
def test_arguments_of_the_wrong_type_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **arguments)


def test_a_seed_that_is_text_is_explained() -> None:
    with pytest.raises(ConfigurationError, match=r"seed='42'.*set_seed\(42\)"):
        set_seed("42")  # type: ignore[arg-type]
