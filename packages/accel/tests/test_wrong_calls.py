"""Wrong calls end in errors of accel that name the argument, before anything is written or changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accel.checkpointing import load_accelerator_state, save_accelerator_state
from accel.contract.strategy import Strategy
from accel.fsdp.merge import merge_fsdp_weights
from accel.fsdp.wrap_policy import repeated_blocks
from accel.hooks import ModelHook, add_hook_to_module
from accel.local_sgd import LocalSGD
from accel.utils import AutocastKwargs, ProfileKwargs, find_executable_batch_size
from accel_bigmodel import (
    disk_offload,
    dispatch_model,
    get_balanced_memory,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_state import AccelError, ConfigurationError, convert_bytes, convert_file_size_to_int
from accel_state.testing import run_world
from accel_track import TrackerRun

NAN = float("nan")
PATHS = ["a\0b", "", 5, b"state", "s3://bucket/ck?version=1", Path("gs://bucket/ck")]


@pytest.fixture
def accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.chdir(tmp_path)
    return Accelerator(cpu=True)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(linear().parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_directories(accelerator: Accelerator, path: Any) -> None:
    model = accelerator.prepare(linear())
    calls: dict[str, Callable[[], Any]] = {
        "output_dir": lambda: accelerator.save_state(path),
        "input_dir": lambda: accelerator.load_state(path),
        "save_directory": lambda: accelerator.save_model(model, path),
        "f": lambda: accelerator.save({"a": torch.ones(1)}, path),
        "project_dir": lambda: ProjectConfiguration(project_dir=path),
        "logging_dir": lambda: ProjectConfiguration(logging_dir=path),
        "project_dir ": lambda: Accelerator(cpu=True, project_dir=path),
        "output_dir ": lambda: save_accelerator_state(path, [], [], [], [], 0, 0),
        "input_dir ": lambda: load_accelerator_state(path, [], [], [], [], 0),
        "output_path": lambda: merge_fsdp_weights(".", path),
        "checkpoint_dir": lambda: merge_fsdp_weights(path, "."),
        "offload_dir": lambda: disk_offload(linear(), path),
        "offload_folder": lambda: load_checkpoint_in_model(linear(), ".", offload_folder=path),
        "logging_dir ": lambda: TrackerRun("jsonl", path),
        "output_trace_dir": lambda: ProfileKwargs(output_trace_dir=path),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigurationError, match=rf"\b{name.strip()}\b"):
            call()
    assert os.listdir() == []


class Sub(Accelerator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    **{f"split_batches={v!r}": ("split_batches", lambda v=v: DataLoaderConfiguration(split_batches=v)) for v in "x2"},
    "even_batches": ("even_batches", lambda: DataLoaderConfiguration(even_batches="false")),  # type: ignore[arg-type]
    "data_seed": ("data_seed", lambda: DataLoaderConfiguration(data_seed="x")),  # type: ignore[arg-type]
    "logical_shards": ("logical_shards", lambda: DataLoaderConfiguration(logical_shards=0)),
    "map None": ("device_map", lambda: dispatch_model(linear(), device_map=None)),  # type: ignore[arg-type]
    "map text": ("device_map", lambda: dispatch_model(linear(), device_map="cpu")),  # type: ignore[arg-type]
    "memory": ("max_memory", lambda: infer_auto_device_map(linear(), max_memory="10GB")),  # type: ignore[arg-type]
    "classes": ("class names", lambda: infer_auto_device_map(linear(), no_split_module_classes=5)),  # type: ignore[arg-type]
    "checkpoint": ("checkpoint", lambda: load_checkpoint_and_dispatch(linear(), 5)),  # type: ignore[arg-type]
    "hook": ("add_hook_to_module", lambda: add_hook_to_module(linear(), "x")),  # type: ignore[arg-type]
    "hook None": ("add_hook_to_module", lambda: add_hook_to_module(linear(), None)),  # type: ignore[arg-type]
    "hook class": ("add_hook_to_module", lambda: add_hook_to_module(linear(), ModelHook)),  # type: ignore[arg-type]
    "hook to text": ("add_hook_to_module", lambda: add_hook_to_module("x", ModelHook())),  # type: ignore[arg-type]
    "min_num_params": ("min_num_params", lambda: FullyShardedDataParallelPlugin(min_num_params=-1)),
    "sync": ("sync_module_states", lambda: FullyShardedDataParallelPlugin(sync_module_states="x")),  # type: ignore[arg-type]
    "init_scale": ("init_scale=-1", lambda: GradScalerKwargs(init_scale=-1)),
    "init_scale NaN": ("init_scale=nan", lambda: GradScalerKwargs(init_scale=NAN)),
    "growth_factor": ("growth_factor", lambda: GradScalerKwargs(growth_factor=0.5)),
    "backoff_factor": ("backoff_factor", lambda: GradScalerKwargs(backoff_factor=2)),
    "growth_interval": ("growth_interval", lambda: GradScalerKwargs(growth_interval=0)),
    "enabled": ("enabled", lambda: AutocastKwargs(enabled="x")),  # type: ignore[arg-type]
    "bucket": ("bucket_cap_mb=-1", lambda: DistributedDataParallelKwargs(bucket_cap_mb=-1)),
    "unused": ("unused", lambda: DistributedDataParallelKwargs(find_unused_parameters="no")),  # type: ignore[arg-type]
    "timeout": ("timeout=5", lambda: InitProcessGroupKwargs(timeout=5)),  # type: ignore[arg-type]
    "timeout below zero": ("timeout", lambda: InitProcessGroupKwargs(timeout=timedelta(seconds=-1))),
    "backend": ("backend=5", lambda: InitProcessGroupKwargs(backend=5)),  # type: ignore[arg-type]
    "activities": ("activities", lambda: ProfileKwargs(activities="cpu")),  # type: ignore[arg-type]
    "schedule": ("schedule_option", lambda: ProfileKwargs(schedule_option="x")),  # type: ignore[arg-type]
    "trace": ("on_trace_ready", lambda: ProfileKwargs(on_trace_ready=5)),  # type: ignore[arg-type]
    "each node": ("save_on_each_node", lambda: ProjectConfiguration(save_on_each_node="x")),  # type: ignore[arg-type]
    "backend that is gone": ("OFI", lambda: Accelerator(cpu=True, dynamo_backend="OFI")),
    "rng_types": ("rng_types=5", lambda: Accelerator(cpu=True, rng_types=5)),  # type: ignore[arg-type]
    "cpu": ("cpu='no'", lambda: Accelerator(cpu="no")),  # type: ignore[arg-type]
    "placement": ("device_placement='no'", lambda: Accelerator(cpu=True, device_placement="no")),  # type: ignore[arg-type]
    "schedulers": ("step_scheduler", lambda: Accelerator(cpu=True, step_scheduler_with_optimizer="no")),  # type: ignore[arg-type]
    "steps": ("gradient_accumulation_steps='4' must", lambda: Accelerator(cpu=True, gradient_accumulation_steps="4")),  # type: ignore[arg-type]
    "short name": ("grad_accum. Did you mean gradient_accumulation_steps", lambda: Accelerator(grad_accum=4)),
    "precision": (r"fp16. Did you mean mixed_precision='fp16'", lambda: Accelerator(fp16=True)),
    "setting of loaders": (r"DataLoaderConfiguration\(even_batches=", lambda: Accelerator(even_batches=True)),
    "of a subclass": (r"mixed_precison. Did you mean mixed_precision\?", lambda: Sub(mixed_precison="bf16")),
    "variadic": (r"no argument unknow. See", lambda: Accelerator(unknow=1)),
    "nothing alike": (r"no argument zzz. See help", lambda: Accelerator(zzz=1)),
    "split": ("split_batches='x'", lambda: Accelerator(cpu=True, split_batches="x")),  # type: ignore[arg-type]
    "list of placements": ("device_placement=", lambda: Accelerator(cpu=True, device_placement=["x"])),  # type: ignore[arg-type]
    "deterministic": ("deterministic_red", lambda: Accelerator(cpu=True, deterministic_reduction="no")),  # type: ignore[arg-type]
    "monitor": ("monitor='no'", lambda: Accelerator(cpu=True, monitor="no")),  # type: ignore[arg-type]
    "batch size": ("starting_batch_size", lambda: find_executable_batch_size(id, "x")()),  # type: ignore[arg-type]
    "size": ("size=-1", lambda: convert_file_size_to_int(-1)),
    "text of a size": ("'10XB' is not a size", lambda: convert_file_size_to_int("10XB")),
    "bytes": ("size='x'", lambda: convert_bytes("x")),  # type: ignore[arg-type]
    "balanced": ("get_balanced_memory", lambda: get_balanced_memory("x")),  # type: ignore[arg-type]
    "strategy": ("Did you mean 'mesh'", lambda: Accelerator(cpu=True, strategy="mehs")),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    text, call = CALLS[name]
    with pytest.raises(ConfigurationError, match=text):
        call()


@pytest.mark.parametrize("value", [NAN, -1, "x", [1], 1.5, float("inf"), torch.ones(2)], ids=repr)
def test_numbers_of_items(accelerator: Accelerator, value: Any) -> None:
    model = accelerator.prepare(linear())
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(ConfigurationError, match="num_items"):
        accelerator.backward(loss, num_items=value)
    assert all(parameter.grad is None for parameter in model.parameters())
    accelerator.backward(loss, num_items=2)


OF_AN_ACCELERATOR: dict[str, tuple[str, Callable[[Accelerator], Any]]] = {
    "no_sync": ("no_sync", lambda accelerator: accelerator.no_sync(5)),  # type: ignore[arg-type]
    "trigger": ("trigger_sync", lambda accelerator: accelerator.trigger_sync_in_backward(None)),  # type: ignore[arg-type]
    "unscale": ("unscale_gradients", lambda accelerator: accelerator.unscale_gradients("x")),
    "load": ("f=5", lambda accelerator: accelerator.load(5)),
    "map of a model": ("verify_device_map", lambda accelerator: accelerator.verify_device_map("x")),  # type: ignore[arg-type]
    "placement": ("device_placement", lambda accelerator: accelerator.prepare(linear(), device_placement="x")),  # type: ignore[call-overload]
    "placements": (
        r"device_placement\[1\]='x'",
        lambda accelerator: accelerator.prepare(loader(), linear(), device_placement=[True, "x"]),
    ),
    "prepare a number": ("prepare.. got 5, a int, as object 2", lambda accelerator: accelerator.prepare(linear(), 5)),
    "prepare a text": ("prepare.. got 'x', a str", lambda accelerator: accelerator.prepare("x")),
    "model's placement": ("device_placement='yes'", lambda accelerator: accelerator.prepare_model(linear(), "yes")),
    "evaluation": (
        "evaluation_mode='yes'",
        lambda accelerator: accelerator.prepare_model(linear(), evaluation_mode="yes"),
    ),
    "optimizer's placement": (
        "device_placement='yes'",
        lambda accelerator: accelerator.prepare_optimizer(sgd(), "yes"),
    ),
    "loader's placement": (
        "device_placement='yes'",
        lambda accelerator: accelerator.prepare_data_loader(loader(), "yes"),
    ),
    "slices": ("slice_fn", lambda accelerator: accelerator.prepare_data_loader(loader(), slice_fn_for_dispatch="x")),
    "pad_first": ("pad_first='x'", lambda accelerator: accelerator.pad_across_processes(torch.ones(2), pad_first="x")),
    "weights": (
        "safe_serialization='x'",
        lambda accelerator: accelerator.save_model(linear(), "a", safe_serialization="x"),
    ),
    "object": ("safe_serialization='x'", lambda accelerator: accelerator.save({}, "a", safe_serialization="x")),
    "objects": ("use_gather_object='x'", lambda accelerator: accelerator.gather_for_metrics([1], "x")),
    "wrapper": (
        "keep_fp32_wrapper='no'",
        lambda accelerator: accelerator.unwrap_model(linear(), keep_fp32_wrapper="no"),
    ),
    "compiled": (
        "keep_torch_compile='no'",
        lambda accelerator: accelerator.unwrap_model(linear(), keep_torch_compile="no"),
    ),
    "names": ("unwrap='no'", lambda accelerator: accelerator.get_state_dict(linear(), unwrap="no")),
    "even": ("even_batches='x'", lambda accelerator: accelerator.join_uneven_inputs([linear()], even_batches="x")),
    "shares": ("apply_padding='x'", lambda accelerator: accelerator.split_between_processes([1], "x").__enter__()),
    "sum of unknown items": (
        "without num_items",
        lambda accelerator: accelerator.backward(torch.ones(()), reduction="sum"),
    ),
    "reduction": ("reduction='x'", lambda accelerator: accelerator.reduce(torch.ones(2), "x")),  # type: ignore[arg-type]
    "scale": ("scale=nan", lambda accelerator: accelerator.reduce(torch.ones(2), scale=NAN)),
    "dim": ("dim='x'", lambda accelerator: accelerator.pad_across_processes(torch.ones(2), dim="x")),  # type: ignore[arg-type]
    "pad": ("pad_index=None", lambda accelerator: accelerator.pad_across_processes(torch.ones(2), pad_index=None)),  # type: ignore[arg-type]
    "blocking": ("blocking='no'", lambda accelerator: accelerator.save_state("a", blocking="no")),  # type: ignore[arg-type]
    "safe": ("safe_serialization", lambda accelerator: accelerator.save_state("a", safe_serialization=None)),  # type: ignore[arg-type]
    "strict": ("strict='no'", lambda accelerator: accelerator.load_state("a", strict="no")),  # type: ignore[arg-type]
    "load_kwargs": ("load_kwargs", lambda accelerator: accelerator.load_state("a", load_kwargs=5)),  # type: ignore[arg-type]
    "log": ("dictionary", lambda accelerator: accelerator.log(5)),  # type: ignore[arg-type]
    "images": ("dictionary", lambda accelerator: accelerator.log_images("x")),  # type: ignore[arg-type]
    "table": ("log_table", lambda accelerator: accelerator.log_table(5)),  # type: ignore[arg-type]
    "artifact": ("local_path", lambda accelerator: accelerator.log_artifact(None)),  # type: ignore[arg-type]
    "init_kwargs": ("init_kwargs", lambda accelerator: accelerator.init_trackers("p", init_kwargs=5)),  # type: ignore[arg-type]
    "LocalSGD": ("local_sgd_steps", lambda accelerator: LocalSGD(accelerator, linear(), NAN)),  # type: ignore[arg-type]
    "LocalSGD's model": ("LocalSGD", lambda accelerator: LocalSGD(accelerator, 5, 2)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OF_AN_ACCELERATOR)
def test_wrong_arguments_of_methods(accelerator: Accelerator, name: str) -> None:
    text, call = OF_AN_ACCELERATOR[name]
    with pytest.raises(ConfigurationError, match=text):
        call(accelerator)
    assert os.listdir() == []


@pytest.mark.parametrize("index", [None, "x", 1, -1], ids=repr)
def test_processes_of_functions(accelerator: Accelerator, index: Any) -> None:
    with pytest.raises(ValueError, match="process_index="):
        accelerator.on_process(print, index)
    with pytest.raises(ValueError, match="local_process_index="):
        accelerator.on_local_process(print, index)


def test_nothing_is_prepared_before_a_wrong_object(accelerator: Accelerator) -> None:
    with pytest.raises(ConfigurationError, match="got 5"):
        accelerator.prepare(linear(), sgd(), 5)
    assert not accelerator._models and not accelerator.prepared.optimizers
    model, nothing = accelerator.prepare(linear(), None)
    assert nothing is None and accelerator._models == [model]


def test_nothing_to_clip(accelerator: Accelerator) -> None:
    accelerator.clip_grad_value_([], 1.0)
    assert accelerator.clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("value", [NAN, -1, "x", None, [1]], ids=repr)
def test_clipping(accelerator: Accelerator, value: Any) -> None:
    model = linear()
    model(torch.ones(1, 2)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(AccelError, match="max_norm"):
        accelerator.clip_grad_norm_(model.parameters(), value)
    with pytest.raises(AccelError, match="clip_value"):
        accelerator.clip_grad_value_(model.parameters(), value)
    with pytest.raises(AccelError, match="norm_type"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=value)
    assert all(torch.equal(new.grad, old) for new, old in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"), float("inf"))
    assert norm == torch.stack([grad.abs().max() for grad in before]).max()


@pytest.mark.parametrize("size", [0, -1, "x", "-1GB", None, True, "0MB", [1]], ids=repr)
def test_sizes_of_files(accelerator: Accelerator, size: Any) -> None:
    model = accelerator.prepare(linear())
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        accelerator.save_model(model, "out", max_shard_size=size)
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        merge_fsdp_weights(".", "out", max_shard_size=size)
    assert os.listdir() == []
    accelerator.save_model(model, "out", max_shard_size="1GiB")
    assert os.listdir("out") == ["model.safetensors"]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("step", ["x", 1.5, NAN, [1]], ids=repr)
def test_steps_of_logs(tmp_path: Path, tracked: bool, step: Any) -> None:
    run = TrackerRun("jsonl" if tracked else None, tmp_path)
    run.init_trackers("project")
    with pytest.raises(ConfigurationError, match="step="):
        run.log({"a": 1}, step=step)
    run.log({"a": 1}, step=torch.tensor(3))
    run.finish()
    with pytest.raises(ConfigurationError, match="project_name"):
        run.init_trackers(5)  # type: ignore[arg-type]


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.frozen = linear(), linear(), linear().requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(8)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def unused_parameters() -> str:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(PartlyUsed())
    accelerator.backward(model(torch.ones(1, 2)).sum())
    model.module.used.requires_grad_(False)  # the reducer still counts it
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2))
    assert caught.value.__suppress_context__
    return str(caught.value)


def test_unused_parameters_are_named_before_the_error_of_torch() -> None:
    names = ", ".join(["idle.weight", "idle.bias", *(f"heads.{index}.weight" for index in range(6))])
    for message in run_world(unused_parameters, 2):
        assert message.startswith(f"{names} and 2 more did not take part in the loss of the last step")
        assert message.index("find_unused_parameters=True") < message.index("Expected to have finished reduction")


def alone_among_others() -> None:
    with pytest.raises(ConfigurationError, match="SingleStrategy trains in one process .* there are 2"):
        Accelerator(strategy="single")


def test_the_strategy_for_one_process_on_two() -> None:
    run_world(alone_among_others, 2)


class Several(Strategy):
    """Needs more than one process."""

    supports_single_process = False


@pytest.mark.parametrize("strategy", [Several(), "fsdp2"], ids=["object", "name"])
def test_a_strategy_for_several_processes_on_one(caplog: pytest.LogCaptureFixture, strategy: Any) -> None:
    with caplog.at_level(logging.WARNING):
        accelerator = Accelerator(cpu=True, strategy=strategy)
    assert ("Several" if isinstance(strategy, Strategy) else "fsdp2") in caplog.text
    model, optimizer = accelerator.prepare(net := linear(), torch.optim.SGD(net.parameters(), lr=0.5))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert all(torch.equal(new, old - 0.5) for new, old in zip(net.parameters(), before, strict=True))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Inner(), Inner()])
        self.head = nn.Linear(4, 40)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(3)])


@pytest.mark.parametrize("names", [None, ["BertLayer"]])
def test_the_blocks_of_the_model_are_suggested(names: list[str] | None) -> None:
    assert repeated_blocks(Stacked()) == ["Block", "Inner"] and repeated_blocks(linear()) == []
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    with pytest.raises(ConfigurationError, match=r"to Block\b"):
        plugin.set_auto_wrap_policy(Stacked())


@pytest.mark.parametrize("content", ["precious", "[]", '{"0.weight": 1}', "[" * 100_000, "\0"])
def test_a_directory_with_another_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"index\.json is not an index"):
        disk_offload(nn.Sequential(linear()), tmp_path, execution_device="cpu")
    assert (tmp_path / "index.json").read_text() == content
