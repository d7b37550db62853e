"""What other libraries (Transformers, TRL, PEFT, diffusers) expect of an Accelerator and of what it has prepared."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.state import AcceleratorState, GradientState, PartialState


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
