"""What other libraries (Transformers, TRL, PEFT, diffusers) expect of an Accelerator and of what it has prepared."""

from __future__ import annotations

import argparse
import copy
import gc
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

from accel import Accelerator, AutocastKwargs
from accel.commands.launch import launch_command, launch_command_parser
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.state import AcceleratorState, GradientState, PartialState
from accel.utils import constants
from accel.utils.dataclasses import get_module_class_from_name
from accel.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from accel.utils.random import set_seed
from accel_launch.errors import LaunchError
from accel_state import ConfigurationError


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
    assert accelerator.prepare("text", 3) == ("text", 3)
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


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
def test_an_accelerator_can_be_pickled(mixed_precision: str, tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
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
    assert copied.state.mixed_precision == mixed_precision and copied.gradient_accumulation_steps == 3
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


# Names that clients import

CONSTANTS = (
    "FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY FSDP_MODEL_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME "
    "SCALER_NAME RNG_STATE_NAME MODEL_NAME WEIGHTS_NAME WEIGHTS_INDEX_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME "
    "SAFE_WEIGHTS_INDEX_NAME WEIGHTS_PATTERN_NAME SAFE_WEIGHTS_PATTERN_NAME STR_OPERATION_TO_FUNC"
)


def test_constants_that_clients_import() -> None:
    """tests/facts/exports has the other names."""
    missing = [name for name in CONSTANTS.split() if not hasattr(constants, name)]
    assert not missing


def test_submodules_are_attributes_that_are_imported_when_used() -> None:
    program = """
import inspect, sys, accel
assert "accel.utils" not in sys.modules and "torch" not in sys.modules
assert not hasattr(accel, "no_such_module") and not hasattr(accel, "_torch_compat")
accel.utils.set_seed(1)
assert accel.state.PartialState().num_processes == 1 and accel.utils.operations.gather
from accel.utils.tqdm import tqdm
assert list(accel.utils.tqdm([1, 2], disable=True)) == [1, 2]
assert inspect.signature(accel.utils.tqdm) == inspect.signature(tqdm)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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
