"""The rest of the Accelerator: metrics, compilation, profiling, memory."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, DistributedType, ProfileKwargs, TorchDynamoPlugin
from accel.contract.strategy import Strategy
from accel.core.compile import compile_regions, has_compiled_regions, has_repeated_blocks, is_repeated_blocks
from accel.training.gather_for_metrics import gather_for_metrics
from accel.utils import get_grad_scaler, get_mixed_precision_context_manager, is_compiled_module
from accel_state import AcceleratorState, ConfigurationError, context
from accel_state.collectives.single import Collectives
from accel_state.env import patch_environment
from accel_state.testing import run_world


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        yield from (torch.tensor(i) for i in range(self.length))


class Sharded(Stream):
    """A stream that can be read from three shards, as those of datasets."""

    num_shards = 3

    def __init__(self, length: int, part: range = range(3)) -> None:
        super().__init__(length)
        self.part = part

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.length, range(*divmod_range(3, num_shards, index)))

    def __iter__(self) -> Any:
        for shard in self.part:
            yield from (torch.tensor(i) for i in range(*divmod_range(self.length, 3, shard)))


def divmod_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of one of several contiguous parts."""
    return length * index // parts, length * (index + 1) // parts


class Uneven(BatchSampler):
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.batch_size = None  # type: ignore[assignment]
        self.drop_last = False

    def __iter__(self) -> Any:
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size + 1

    def __len__(self) -> int:
        return len(list(iter(self)))


def loaders(length: int, batch: int) -> dict[str, tuple[Any, DataLoaderConfiguration]]:
    samples = torch.arange(length)
    return {
        "map": (DataLoader(samples, batch_size=batch), DataLoaderConfiguration()),
        "dispatched": (DataLoader(samples, batch_size=batch), DataLoaderConfiguration(dispatch_batches=True)),
        "stream": (DataLoader(Stream(length), batch_size=batch), DataLoaderConfiguration(dispatch_batches=False)),
        "sharded stream": (DataLoader(Sharded(length), batch_size=batch), DataLoaderConfiguration()),
        "dispatched stream": (DataLoader(Stream(length), batch_size=batch), DataLoaderConfiguration()),
        "dynamic": (DataLoader(samples, batch_sampler=Uneven(length)), DataLoaderConfiguration()),
    }


def collect(lengths: list[int], batch: int) -> None:
    for length in lengths:
        for name, (loader, config) in loaders(length, batch).items():
            if length < 4 and "stream" in name:
                continue
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            prepared = accelerator.prepare(loader)
            numbers, pairs, objects, losses, tokens = [], [], [], [], []
            for x in prepared:
                numbers.append(accelerator.gather_for_metrics(x))
                gathered = accelerator.gather_for_metrics(
                    {"x": x * 2, "loss": x.float().mean(), "two": [torch.stack([x, x], 1)]}
                )
                pairs.append(gathered["two"][0])
                objects += accelerator.gather_for_metrics([f"s{i}" for i in x.tolist()])
                rows = accelerator.gather_for_metrics(list(x), use_gather_object=True)
                assert isinstance(rows, list) and torch.equal(torch.stack(rows), numbers[-1]), (name, length)
                # As Transformers' Trainer does: the loss of a batch, as often as a full batch has samples.
                losses.append(accelerator.gather_for_metrics(x.float().mean().repeat(batch)))
                tokens.append(accelerator.gather_for_metrics(x.repeat_interleave(3)))
            expected = list(range(length))
            # Batches of a dynamic loader have no full size, and ranks that read different shards no common one.
            irregular = name == "dynamic" or (name == "sharded stream" and accelerator.num_processes > 1)
            if not irregular:
                assert len(torch.cat(losses)) == length, (name, length, losses)
            assert len(torch.cat(tokens)) == 3 * length, (name, length, tokens)
            assert torch.equal(torch.cat(tokens)[::3], torch.cat(numbers)), (name, length, tokens)
            if name == "sharded stream":  # ranks read different shards at the same time
                assert sorted(torch.cat(numbers).tolist()) == expected, (name, length, numbers)
                continue
            assert torch.cat(numbers).tolist() == expected, (name, length, torch.cat(numbers).tolist())
            assert torch.cat(pairs).tolist() == [[i, i] for i in expected], (name, length)
            assert objects == [f"s{i}" for i in expected], (name, length, objects)


def test_gathered_metrics_are_the_data_set_in_one_process() -> None:
    collect([1, 7, 16], 4)


@pytest.mark.parametrize(
    ("world", "lengths"), [(2, [1, 3, 8, 17, 23, 32]), pytest.param(4, [3, 5, 16, 30, 33], marks=pytest.mark.slow)]
)
def test_gathered_metrics_are_the_data_set_on_several_ranks(world: int, lengths: list[int]) -> None:
    run_world(collect, world, lengths, 4, timeout=120)


def count_classes(length: int, **settings: Any) -> tuple[list[int], list[int], list[str]]:
    """Count the samples of each of 5 classes, and all of them, by gathering the counts of each batch."""
    logged: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("accel.training.gather_for_metrics"), logging.NullHandler()
    handler.handle = logged.append  # type: ignore[assignment]
    logger.addHandler(handler)
    with context.isolated():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
        classes, counts = torch.zeros(5, dtype=torch.int64), []
        for x in accelerator.prepare(DataLoader(torch.arange(length), batch_size=4)):
            classes += accelerator.gather_for_metrics(torch.bincount(x % 5, minlength=5)).view(-1, 5).sum(0)
            counts += accelerator.gather_for_metrics(torch.tensor([len(x)])).tolist()
    logger.removeHandler(handler)
    return classes.tolist(), counts, [record.getMessage() for record in logged]


def test_counts_of_one_process_are_not_cut() -> None:
    for settings in ({}, {"dispatch_batches": True}):
        assert count_classes(22, **settings) == ([5, 5, 4, 4, 4], [4, 4, 4, 4, 4, 2], [])


def counts_of_classes() -> list[Any]:
    return [count_classes(22), count_classes(22, dispatch_batches=True)]


def test_counts_of_ranks_are_kept_with_a_warning_about_padding() -> None:
    results = run_world(counts_of_classes, 2)
    for padded, divided in results:
        assert divided == ([5, 5, 4, 4, 4], [4, 4, 4, 4, 3, 3], [])
        assert padded[:2] == ([6, 6, 4, 4, 4], [4] * 6)  # the loader repeats the samples 0 and 1
    assert "5 rows in a last step with padding, where each rank has 4 samples" in results[0][0][2][0]


class Loader:
    """A loader of another library: it tells where it is, and nothing more."""

    def __init__(self, remainder: int, **more: Any) -> None:
        self.end_of_dataloader, self.remainder = True, remainder
        self.__dict__.update(more)


def with_other_loaders() -> None:
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    rank, world = accelerator.process_index, accelerator.num_processes
    two = torch.tensor([2 * rank, 2 * rank + 1])
    for remainder, kept in ((3, 3), (0, 2 * world), (-1, 2 * world)):
        loader = Loader(remainder)
        state.activate(loader)
        gathered = accelerator.gather_for_metrics({"x": two, "loss": torch.tensor(1.0)})
        assert gathered["x"].tolist() == list(range(kept)) and gathered["loss"].tolist() == [1.0] * world
    # Where batches differ between ranks, each rank knows its padding.
    loader = Loader(-1, ragged=True, real_samples=2 - rank)
    state.activate(loader)
    gathered = accelerator.gather_for_metrics({"x": two, "loss": torch.tensor(1.0 + rank)})
    assert gathered["x"].tolist() == [0, 1, 2] and gathered["loss"].tolist() == [1.0, 2.0]
    assert accelerator.gather_for_metrics({"rank": rank}) == [{"rank": r} for r in range(world)]
    alone = gather_for_metrics(two, accelerator.process_state, state, collectives=Collectives())
    assert alone.tolist() == two[: 2 - rank].tolist()


def test_loaders_of_other_libraries_need_only_tell_their_end() -> None:
    run_world(with_other_loaders, 2)


def test_one_process_drops_the_padding_of_steps_that_are_divided() -> None:
    accelerator = Accelerator(cpu=True)
    for divided, kept in ({}, [0, 1]), ({"logical_shard": 0}, [0]):
        loader = Loader(-1, ragged=True, real_samples=1, **divided)
        accelerator.gradient_state.activate(loader)
        assert accelerator.gather_for_metrics(torch.arange(2)).tolist() == kept


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2)})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).relu()
        out: torch.Tensor = self.heads["a"](x)
        return out


def test_repeated_blocks_are_compiled_on_their_own() -> None:
    torch.manual_seed(0)
    model = Blocks()
    expected = model(torch.arange(8))
    assert has_repeated_blocks(model) and is_repeated_blocks(model.layers) and not is_repeated_blocks(model.heads)
    assert compile_regions(model, backend="eager") is model
    assert has_compiled_regions(model) and not is_compiled_module(model)
    assert all(is_compiled_module(layer) for layer in model.layers) and is_compiled_module(model.embedding)
    assert torch.allclose(model(torch.arange(8)), expected) and set(model.state_dict()) == set(Blocks().state_dict())


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_train_like_others(regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, mixed_precision="bf16")
    torch.manual_seed(0)
    model, plain = Blocks(), Blocks()
    plain.load_state_dict(model.state_dict())
    assert accelerator.state.dynamo_plugin is plugin
    prepared = accelerator.prepare(model)
    assert is_compiled_module(prepared) != regional and has_compiled_regions(prepared) == regional
    accelerator.backward(prepared(torch.arange(8)).square().mean())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = plain(torch.arange(8))
    out.float().square().mean().backward()
    for a, b in zip(prepared.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-2)


def test_compilation_settings() -> None:
    with patch_environment(
        ACCELERATE_DYNAMO_BACKEND="INDUCTOR",
        ACCELERATE_DYNAMO_MODE="reduce-overhead",
        ACCELERATE_DYNAMO_USE_DYNAMIC="1",
    ):
        plugin = TorchDynamoPlugin()
        assert plugin.to_kwargs() == {"backend": "inductor", "mode": "reduce-overhead", "dynamic": True}
        assert TorchDynamoPlugin(mode="default", dynamic=False).to_kwargs() == {"backend": "inductor", "dynamic": False}
        assert plugin.compiles and TorchDynamoPlugin(mode="default").mode == "default"
        assert "mode" not in TorchDynamoPlugin(options={"x": 1}).to_kwargs()
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert not TorchDynamoPlugin().compiles and not TorchDynamoPlugin(backend="eager", disable=True).compiles  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode='fast'"):
        TorchDynamoPlugin(mode="fast")
    with pytest.raises(ConfigurationError, match="not a DynamoBackend"):
        TorchDynamoPlugin(backend="nope")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="both given"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    assert Accelerator(cpu=True).state.dynamo_plugin == TorchDynamoPlugin()


def test_profiles_are_written_for_each_rank(tmp_path: Path) -> None:
    ready: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=lambda p: ready.append(p.step_num),
        record_shapes=True,
        output_trace_dir=str(tmp_path / "traces"),
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        for _ in range(4):
            torch.ones(3, 3) @ torch.ones(3, 3)
            profiler.step()
    assert ready == [3]
    assert "traceEvents" in json.loads((tmp_path / "traces" / "profile_0.json").read_text())
    with accelerator.profile(ProfileKwargs(activities=["cpu"], with_flops=True)) as profiler:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert any(event.flops for event in profiler.key_averages())
    with pytest.raises(ConfigurationError, match="'tpu' is not a profiler activity"):
        ProfileKwargs(activities=["tpu"]).build()  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"unknown keys \['active_steps'\]"):
        ProfileKwargs(schedule_option={"active_steps": 1}).build()


def test_memory_is_given_back() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(2, 2), DataLoader(TensorDataset(torch.ones(4, 2))))
    with accelerator.accumulate(model):
        accelerator.backward(model(next(iter(loader))[0]).sum())
    model_ref, loader_ref = weakref.ref(model), weakref.ref(loader)
    model, loader = accelerator.free_memory(model, loader)
    assert model is None and loader is None
    gc.collect()
    assert model_ref() is None and loader_ref() is None and not accelerator._models and not accelerator._dataloaders
    assert accelerator.clear() == []


def test_what_an_accelerator_says_of_itself() -> None:
    accelerator = Accelerator(cpu=True, rng_types=["torch", "numpy"])
    assert accelerator.distributed_type == DistributedType.NO and accelerator.device == torch.device("cpu")
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process and accelerator.is_local_main_process and accelerator.is_last_process
    assert not accelerator.use_distributed and not accelerator.multi_device and not accelerator.native_amp
    assert accelerator.even_batches and not accelerator.split_batches and accelerator.dispatch_batches is None
    assert (
        not accelerator.use_seedable_sampler
        and not accelerator.non_blocking
        and not accelerator.use_stateful_dataloader
    )
    assert accelerator.sync_gradients and accelerator.step == 0 and not accelerator.optimizer_step_was_skipped
    assert accelerator.save_iteration == 0 and accelerator.should_save_model and accelerator.logging_dir is None
    assert [str(kind) for kind in accelerator.rng_types] == ["torch", "numpy"]
    with pytest.raises(ConfigurationError, match="not a RNGType"):
        Accelerator(cpu=True, rng_types=["dice"])
    assert not accelerator.verify_device_map(nn.Linear(1, 1))


def test_helpers_without_an_accelerator() -> None:
    ones = torch.ones(2, 2, device=AcceleratorState(mixed_precision="bf16", cpu=True).device)
    with get_mixed_precision_context_manager(native_amp=True):
        assert (ones @ ones).dtype == torch.bfloat16
    with get_mixed_precision_context_manager():
        assert (ones @ ones).dtype == torch.float32
    assert get_grad_scaler(init_scale=4.0).scale(torch.ones(())) == 4


class Fused(torch.optim.SGD):
    """An optimizer that updates in the backward pass, in the form of lomo-optim's."""

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= lr * parameter.grad


def test_optimizers_that_update_in_the_backward_pass() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigurationError, match="no prepared optimizer updates weights"):
        accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.5)
    model, _ = accelerator.prepare(model, Fused(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.5)
    assert torch.equal(model.weight, before - 0.5)
    with pytest.raises(ConfigurationError, match="Fused needs the learning rate"):
        accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=None)


def coordinates() -> tuple[int, ...]:
    accelerator = Accelerator(cpu=True)
    with accelerator.maybe_context_parallel(buffers=[torch.ones(2)], buffer_seq_dims=[0]):
        pass
    return (
        accelerator.data_parallel_rank,
        accelerator.data_parallel_shard_rank,
        accelerator.tensor_parallel_rank,
        accelerator.context_parallel_rank,
        accelerator.pipeline_parallel_rank,
    )


def test_data_parallel_ranks_have_coordinates_on_one_axis() -> None:
    assert run_world(coordinates, 2) == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0)]
    accelerator = Accelerator(cpu=True)
    assert (
        accelerator.torch_device_mesh is None
        and accelerator.parallelism_config is None
        and accelerator.fp8_backend is None
    )
    assert (
        not accelerator.is_composable_parallelism_enabled
        and not accelerator.is_fsdp2
        and accelerator.deepspeed_plugin is None
    )
    with pytest.raises(ConfigurationError, match="'student'.*DeepSpeed"):
        accelerator.state.select_deepspeed_plugin("student")


class OwnStrategy(Strategy):
    """Trains in one process, and counts the models that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = 0

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self.wrapped += 1
        return model


def test_a_strategy_object_is_used_as_it_is() -> None:
    strategy = OwnStrategy()
    accelerator = Accelerator(strategy=strategy)
    accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.strategy is strategy
    assert (strategy.wrapped, strategy.state.num_processes) == (1, 1)


def test_a_strategy_may_be_named() -> None:
    assert type(Accelerator(strategy="single").strategy).__name__ == "SingleStrategy"


@pytest.mark.parametrize("strategy", ["sharded-somehow", Strategy, 1])
def test_an_unknown_strategy_is_refused(strategy: object) -> None:
    with pytest.raises(ConfigurationError, match="strategy"):
        Accelerator(strategy=strategy)


def test_a_strategy_and_a_plugin_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="torch_tp"):
        Accelerator(strategy="single", torch_tp_plugin=object())


class OverridingAccelerator(Accelerator):
    """A client's subclass."""

    calls: list[str]

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, **kwargs: Any) -> nn.Module:
        self.calls.append("prepare_model")
        return super().prepare_model(model, device_placement, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        self.calls.append("get_state_dict")
        return super().get_state_dict(model, unwrap)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("load_state")
        super().load_state(*args, **kwargs)


def test_methods_that_a_subclass_overrides_are_called(tmp_path: Path) -> None:
    OverridingAccelerator.calls = []
    accelerator = OverridingAccelerator(cpu=True, project_dir=str(tmp_path))
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    assert accelerator.resume()
    assert accelerator.calls == ["prepare_model", "get_state_dict", "load_state"]


def test_unwrapping_an_object_that_forwards_to_a_model() -> None:
    """accmt hands such objects to unwrap_model."""

    class Proxy:
        def __init__(self, model: Any) -> None:
            self.model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["model"], name)

    accelerator = Accelerator(cpu=True)
    proxy = Proxy(accelerator.prepare(torch.nn.Linear(1, 1)))
    assert accelerator.unwrap_model(proxy) is proxy  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ConfigurationError, match="3"):
        accelerator.unwrap_model(3)  # type: ignore[arg-type]


def test_a_precision_that_overrides_the_launchers_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())
    for launched, given, used in (("bf16", None, "bf16"), ("bf16", "bf16", "bf16"), ("no", "bf16", "bf16")):
        with patch_environment(ACCELERATE_MIXED_PRECISION=launched):
            assert Accelerator(cpu=True, mixed_precision=given).mixed_precision == used
    assert "overrides" not in caplog.text
    with patch_environment(ACCELERATE_MIXED_PRECISION="bf16"):
        assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    assert "mixed_precision='no' of the script overrides the launcher's bf16" in caplog.text
