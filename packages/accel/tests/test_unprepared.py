"""Objects that were not prepared, and arguments of the wrong type: what the user is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import (
    AutocastKwargs,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from accel_data import PreparedLoader
from accel_state import AcceleratorState
from accel_state import logging as accel_logging
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


class Model(nn.Module):
    """A model with a method that is not its forward, and a part that the forward does not always use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        return self.linear(x) + (self.spare(x) if spare else 0)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def objects(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = Model()
    data = TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(0)))
    return model, torch.optim.SGD(model.parameters(), lr=lr), DataLoader(data, batch_size=2)


class Messages(logging.Handler):
    """Collects warnings of accel."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def steps(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, count: int = 3) -> None:
    for (x,), _ in zip(loader, range(count), strict=False):
        with accelerator.accumulate():
            accelerator.backward(model(x.to(accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def all_prepared(accelerator: Accelerator, between: Callable[[], Any] = lambda: None) -> None:
    model, optimizer, loader = objects()
    scheduler = StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with accelerator.accumulate(model):
        pass
    steps(accelerator, model, optimizer, loader, count=1)
    scheduler.step()
    between()
    steps(accelerator, model, optimizer, loader)


def model_not_prepared(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    steps(accelerator, model, optimizer, loader)


def model_beside_not_prepared(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    other = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(other.parameters())})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps(accelerator, lambda x: other(model(x)), optimizer, loader)


def result_of_prepare_not_used(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    _, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps(accelerator, model, optimizer, loader)


def optimizer_not_prepared(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    model, loader = accelerator.prepare(model, loader)
    steps(accelerator, model, optimizer, loader)


def optimizer_of_a_model_not_prepared(accelerator: Accelerator) -> None:
    """Another model is trained with its own optimizer and loss, as by plain PyTorch."""
    other = nn.Linear(1, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    all_prepared(accelerator, between=own.step)


def loader_not_prepared(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    model, optimizer = accelerator.prepare(model, optimizer)
    steps(accelerator, model, optimizer, loader)


def loader_not_prepared_beside_another(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(range(4)))
    shares = DataLoader(loader.dataset, 2, sampler=range(accelerator.process_index, 16, accelerator.num_processes))
    steps(accelerator, model, optimizer, shares)


def accumulate_not_prepared(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.accumulate(model):
        steps(accelerator, prepared, optimizer, loader)


def scheduler_of_another_optimizer(accelerator: Accelerator) -> None:
    model, optimizer, loader = objects()
    scheduler = StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps(accelerator, model, optimizer, loader)


def optimizer_of_another_model(accelerator: Accelerator) -> None:
    model, _, loader = objects()
    model, optimizer, loader = accelerator.prepare(model, objects()[1], loader)
    steps(accelerator, model, optimizer, loader)


CASES: dict[Callable[[Accelerator], None], list[str]] = {
    all_prepared: [],
    model_not_prepared: ["depends on 4 parameters of models that were not prepared (shapes (1, 2), (1,)"],
    model_beside_not_prepared: ["depends on 2 parameters of models that were not prepared (shapes (1, 1), (1,))"],
    result_of_prepare_not_used: ["the loss was computed with the Model passed to prepare()"],
    optimizer_not_prepared: ["SGD.step was called on an optimizer that was not prepared"],
    optimizer_of_a_model_not_prepared: [],
    loader_not_prepared: ["the first batch of rank 0 and rank 1 is the same"],
    loader_not_prepared_beside_another: ["outside of a loop over a prepared DataLoader"],
    accumulate_not_prepared: ["accumulate got a Model that prepare() did not return"],
    scheduler_of_another_optimizer: ["the prepared StepLR changes the learning rate of an optimizer that was not"],
    optimizer_of_another_model: ["SGD.step found no gradient in any of its 4 parameters"],
}


def on_a_rank() -> tuple[dict[str, list[str]], list[str]]:
    """The warnings of each case, and the errors of a model with unused parameters and of a method of its own."""
    handler, found = Messages(), {}
    logging.getLogger().addHandler(handler)
    for case in CASES:
        handler.texts = []
        accel_logging._already_warned.clear()
        accelerator = Accelerator(cpu=True)
        case(accelerator)
        found[case.__name__] = handler.texts
        accelerator.free_memory()
    logging.getLogger().removeHandler(handler)
    model = accelerator.prepare(Model())
    errors = []
    try:
        model.encode(torch.ones(1, 2))
    except AttributeError as error:
        errors.append(str(error))
    assert not hasattr(model, "nothing") and model.module.encode is not None
    for _ in range(2):
        try:
            accelerator.backward(model(torch.ones(1, 2), spare=False).mean())
        except RuntimeError as error:
            errors.append(str(error))
    accelerator.free_memory()
    allowed = DistributedDataParallelKwargs(find_unused_parameters=True)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[allowed])
    model = accelerator.prepare(Model())
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2), spare=False).mean())
    return found, errors


def test_on_two_processes() -> None:
    (found, errors), (silent, _) = run_world(on_a_rank, 2)
    for case, expected in CASES.items():
        texts = found[case.__name__]
        assert len(texts) == len(expected), (case.__name__, texts)
        assert all(part in text for part, text in zip(expected, texts, strict=True)), (case.__name__, texts)
    assert not any(silent.values()), "warnings are those of the main process"
    assert "'encode', the Model in it has: use accelerator.unwrap_model(model).encode" in errors[0]
    assert "[DistributedDataParallelKwargs(find_unused_parameters=True)]" in errors[1] and len(errors) == 2


def test_on_one_process_only_what_goes_wrong_there_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    logged = []
    for case in CASES:
        caplog.clear()
        accel_logging._already_warned.clear()
        case(Accelerator(cpu=True))
        logged += [case] if caplog.records else []
    assert logged == [scheduler_of_another_optimizer, optimizer_of_another_model]
    caplog.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer_not_prepared(accelerator)
    assert "SGD.step was called on an optimizer that was not prepared" in caplog.text


def under_fsdp(settings: dict[str, Any]) -> list[str]:
    """Warnings about an optimizer of a sharded model, and of another model, that were not prepared."""
    handler = Messages()
    logging.getLogger().addHandler(handler)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
    model, optimizer, _ = objects()
    own = torch.optim.Adam(nn.Linear(1, 1).parameters())
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(2, 2)).mean())
    own.step()
    optimizer.step()
    return [text for text in handler.texts if "not prepared" in text]


@pytest.mark.parametrize("settings", [{"fsdp_version": 1, "use_orig_params": False}, {"fsdp_version": 2}])
def test_an_optimizer_of_replaced_parameters_is_told(settings: dict[str, Any]) -> None:
    (texts, _) = run_world(under_fsdp, 2, settings)
    assert len(texts) == 1 and texts[0].startswith("SGD.step was called on an optimizer that was not prepared")


def test_later_steps_have_no_hook() -> None:
    from torch.optim import optimizer as torch_optimizer

    before = len(torch_optimizer._global_optimizer_pre_hooks)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    all_prepared(accelerator)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ([nn.Linear(1, 1)], "a list with a Linear. Pass the objects themselves"),
        ({"model": nn.Linear(1, 1)}, "a dict with a Linear"),
        (nn.Linear, "the class Linear. Pass an object of it"),
        (torch.optim.AdamW, "the class AdamW"),
        (nn.Linear(1, 1).parameters(), "a generator, such as model.parameters()"),
        (list(nn.Linear(1, 1).parameters()), "a list with a Parameter"),
        (TensorDataset(torch.ones(2)), "the data set TensorDataset. Pass a DataLoader of it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_prepare_cannot_prepare_is_logged(
    argument: Any, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel_logging, "_already_warned", set())
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(argument) is argument
    assert f"prepare() got {message}" in caplog.text
    caplog.clear()
    for other in ([1, "a"], {"a": 1}, None, object(), lambda: 0):
        assert accelerator.prepare(other) is other
    assert not caplog.records


def test_loaders_of_other_libraries_are_prepared(caplog: pytest.LogCaptureFixture) -> None:
    nodes = pytest.importorskip("torchdata.nodes", reason="needs torchdata")
    loader = Accelerator(cpu=True).prepare(nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(range(5)), 2, False)))
    assert isinstance(loader, PreparedLoader) and list(loader) == [[0, 1], [2, 3], [4]]
    assert not caplog.records


def empty_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


WRONG: list[tuple[Callable[[Accelerator], Any], str]] = [
    (lambda a: a.clip_grad_norm_(nn.Linear(1, 1), 1.0), "clip_grad_norm_ got Linear.*: model.parameters()"),
    (lambda a: a.clip_grad_norm_(nn.Linear(1, 1).named_parameters(), 1.0), "clip_grad_norm_ got .'weight'.*a tuple"),
    (lambda a: a.clip_grad_value_(nn.Linear(1, 1), 1.0), "clip_grad_value_ got Linear"),
    (lambda a: a.clip_grad_norm_(3, 1.0), "clip_grad_norm_ got 3, a int"),
    (lambda a: a.backward(0.5), "backward got 0.5, a float. Pass the tensor of the loss"),
    (lambda a: a.backward({"loss": torch.ones(1)}), "backward got .'loss'.*, a dict"),
    (lambda a: a.backward(None), "backward got None"),
    (lambda a: a.prepare(empty_model()), "Linear cannot be prepared: weight has no values .it is on the meta device."),
    (lambda a: a.prepare_model("gpt2"), "prepare_model got 'gpt2', a str"),
    (lambda a: a.prepare_model(nn.Linear), "prepare_model got the class Linear"),
    (lambda a: a.prepare_optimizer(nn.Linear(1, 1)), "prepare_optimizer got Linear"),
    (lambda a: a.prepare_scheduler(nn.Linear(1, 1)), "prepare_scheduler got Linear"),
    (lambda a: a.prepare_data_loader([1, 2]), "prepare_data_loader got .1, 2., a list"),
    (lambda a: a.skip_first_batches(DataLoader([1]), "3"), "num_batches='3' must be an integer"),
    (lambda a: a.skip_first_batches(DataLoader([1]), 0.5), "num_batches=0.5 must be an integer"),
    (lambda a: a.skip_first_batches([1], 1), "skip_first_batches got .1., a list. Pass a DataLoader"),
    (lambda a: a.unwrap_model(None), "unwrap_model got None"),
    (lambda a: a.get_state_dict("gpt2"), "get_state_dict got 'gpt2', a str"),
    (lambda a: a.save_model(nn.Linear(1, 1), None), "save_directory=None"),
    (lambda a: a.accumulate([nn.Linear(1, 1)]), "accumulate got .Linear.*, a list. Pass prepared models one by one"),
    (lambda a: a.accumulate("model"), "accumulate got 'model', a str"),
    (lambda a: a.autocast("fp16"), "autocast got 'fp16', a str. Pass AutocastKwargs"),
    (lambda a: a.profile({"activities": ["cpu"]}).__enter__(), "profile got .*, a dict. Pass ProfileKwargs"),
    (lambda a: a.join_uneven_inputs(nn.Linear(1, 1)), "join_uneven_inputs got Linear.*Pass a list"),
    (lambda a: a.register_save_state_pre_hook("hook"), "a hook must be a function, not 'hook', a str"),
    (lambda a: Accelerator(cpu=True, kwargs_handlers=AutocastKwargs()), "kwargs_handlers got AutocastKw.*Pass a list"),
    (lambda a: Accelerator(cpu=True, gradient_accumulation_plugin=2), "GradientAccumulationPlugin.num_steps=2."),
    (lambda a: Accelerator(cpu=True, dynamo_plugin="inductor"), "TorchDynamoPlugin.backend='inductor'."),
    (lambda a: Accelerator(cpu=True, parallelism_config=2), "^parallelism_config=2 must be a ParallelismConfig"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_arguments_of_the_wrong_type(call: Callable[[Accelerator], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(Accelerator(cpu=True))


def test_numbers_that_are_meant() -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(range(4))
    for count in (2.0, torch.tensor(2)):
        assert len(list(accelerator.skip_first_batches(loader, count))) == 2


def test_a_state_that_was_reset_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    for read in (lambda: accelerator.device, lambda: accelerator.mixed_precision):
        with pytest.raises(AttributeError, match="it was reset .* Create a new Accelerator"):
            read()
    with pytest.raises(AttributeError, match="AcceleratorState.*'nothing'$"):
        Accelerator(cpu=True).state.nothing  # noqa: B018


def accumulated(in_blocks: bool, own_backward: bool, **settings: Any) -> list[float]:
    """Train with two micro batches per step, and return the weights."""
    accelerator = Accelerator(cpu=True, **settings)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(TensorDataset(torch.ones(2, 2)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model) if in_blocks else nullcontext():
            loss = model(inputs).sum()
            if own_backward:
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.flatten().tolist()


@pytest.mark.parametrize(
    ("in_blocks", "own_backward", "warning", "weight"),
    [
        (True, False, "", 0.5),
        (False, False, "accumulate() was not entered", 0.5),  # two steps with half a gradient each
        (True, True, "not from accelerator.backward(loss)", 0.0),
        (False, True, "not from accelerator.backward(loss)", 0.0),
    ],
)
def test_accumulation_that_the_loop_leaves_out(
    in_blocks: bool,
    own_backward: bool,
    warning: str,
    weight: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accel_logging, "_already_warned", set())
    assert accumulated(in_blocks, own_backward, gradient_accumulation_steps=2) == [weight, weight]
    assert [warning in record.getMessage() for record in caplog.records] == [True] * bool(warning)
    caplog.clear()
    accumulated(in_blocks, own_backward)
    assert not caplog.records


def test_a_loop_that_sets_sync_gradients_itself_is_not_warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel_logging, "_already_warned", set())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for ends in (False, True):
        accelerator.gradient_state._set_sync_gradients(ends)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    assert optimizer.steps_taken == 1 and not caplog.records


@pytest.mark.parametrize("samples", [1, 2])  # a loader's last micro batch counts as 0
@pytest.mark.parametrize("inside", [True, False])
def test_loops_that_accumulate_are_not_warned(
    inside: bool, samples: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel_logging, "_already_warned", set())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(TensorDataset(torch.ones(samples, 2)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).sum()
            if inside:
                accelerator.backward(loss)
        if not inside:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps_taken == 1 and not caplog.records


def test_a_loss_that_was_not_scaled_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"call accelerator.backward\(loss\)"):
        accumulated(in_blocks=True, own_backward=True, mixed_precision="fp16")


class TwoSteps(torch.optim.Optimizer):
    """Like SAM: it moves the weights, and has the optimizer in it step by the gradients of the other place."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def past_the_prepared_one(accelerator: Accelerator, kind: str) -> torch.Tensor:
    """Train with an optimizer that is not stepped by the prepared one, or is; return the weights."""
    torch.manual_seed(0)
    model, raw, loader = objects()
    first = next(model.parameters())
    inner = TwoSteps(model.parameters()) if "inner" in kind else raw
    model, optimizer, loader = accelerator.prepare(model, inner, loader)
    if kind == "averaged":
        accelerator.moving_average(model)
    for (x,), _ in zip(loader, range(4), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if kind == "inner, after two passes":
                accelerator.backward(model(x).square().mean())
                optimizer.inner.step()
            elif kind == "scaler":
                accelerator.scaler.step(raw)  # type: ignore[union-attr]
                accelerator.scaler.update()  # type: ignore[union-attr]
            elif kind == "at its end":
                if accelerator.sync_gradients:
                    raw.step()
            else:
                (raw if kind in ("raw", "averaged") else optimizer).step()
            optimizer.zero_grad()
    return first.detach()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("raw", {"gradient_accumulation_steps": 2}, "in the middle of an accumulation window"),
        ("raw", {"mixed_precision": "fp16"}, "the loss scale of mixed_precision='fp16'"),
        ("averaged", {}, "a moving average counts the steps of that one"),
        ("inner, after two passes", {"mixed_precision": "fp16"}, "the loss scale of mixed_precision='fp16'"),
    ],
)
def test_a_step_past_the_prepared_optimizer_is_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"SGD\.step\(\) was not called by .*{message}.*Call step\(\) of the"):
        past_the_prepared_one(Accelerator(cpu=True, **settings), kind)


def past_the_engine() -> tuple[str, float]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=1))
    model, raw, loader = objects()
    model, optimizer, loader = accelerator.prepare(model, raw, loader)
    raw.step()  # without gradients, as before a schedule
    accelerator.backward(model(torch.ones(2, 2)).mean())
    with pytest.raises(ConfigurationError) as refused:
        raw.step()
    before = next(model.parameters()).detach().clone()
    optimizer.step()
    raw.step()  # as the engine does now
    return str(refused.value), float((next(model.parameters()) - before).abs().max())


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the engine is DeepSpeed's")
def test_a_step_past_an_engine_is_refused() -> None:
    [(message, moved)] = run_world(past_the_engine, 1)
    assert "SGD.step() was called on the optimizer that was passed to prepare()" in message and moved > 0.01


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("inner", {"gradient_accumulation_steps": 2}),
        ("inner", {"mixed_precision": "fp16"}),
        ("at its end", {"gradient_accumulation_steps": 2}),
        ("scaler", {"mixed_precision": "fp16"}),
        ("raw", {}),
    ],
)
def test_steps_with_the_right_gradients_are_not_refused(kind: str, settings: dict[str, Any]) -> None:
    expected = past_the_prepared_one(Accelerator(cpu=True, **settings), "prepared")
    found = past_the_prepared_one(Accelerator(cpu=True, **settings), kind)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
