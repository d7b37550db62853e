"""Ranks that use different units or parameters of a sharded model: an error before a wrong step is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_nets import WIDTH, Block
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel import Accelerator, ParallelismConfig
from accel.core.local_part import local
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.errors import DistributedOperationException
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_all_gather"), reason="this torch shows no collectives"),
]

# What each rank does from the step on that has the number of the case.
CASES = {1: "branch", 2: "order", 3: "loss", 4: "heads"}
FOUND = {
    "branch": ("gathers a", "gathers b"),
    "order": ("gathers a", "gathers b"),
    "loss": ("gathers a", "gathers b"),
    "heads": ("has a gradient of d.weight", "has a gradient of e.weight"),
}


class Net(nn.Module):
    """A model whose forward depends on ``first``: True uses what comes first in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.d, self.e = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, case: str, first: bool) -> torch.Tensor:
        if case == "branch":
            return self.a(x) if first else self.b(x)
        if case == "order":
            y, z = (self.a(x), self.b(x)) if first else reversed((self.b(x), self.a(x)))
            return y + 2 * z
        if case == "loss":
            outputs = (self.a(x), self.b(x))
            return outputs[0 if first else 1]
        x = self.c(x)
        return self.d(x) if first else self.e(x)


def plugin(version: int = 2) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def train(accelerator: Accelerator, case: str, differs_in: int) -> tuple[str, bool]:
    """The error of the step in which ranks differ, and whether it has left the weights alone."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(1, differs_in + 1):
        before = parts_of(model)
        first = step < differs_in or accelerator.process_index == 0
        accelerator.backward(model(torch.ones(2, WIDTH), case, first).square().mean())
        try:
            optimizer.step()
        except DistributedOperationException as error:
            return str(error), all(map(torch.equal, before, parts_of(model)))
        optimizer.zero_grad()
    return "", False


def in_one_group(version: int) -> list[tuple[str, bool]]:
    return [train(Accelerator(cpu=True, fsdp_plugin=plugin(version)), case, number) for number, case in CASES.items()]


@pytest.mark.parametrize("version", [1, 2])
def test_ranks_that_differ_in_a_step_do_not_take_it_and_name_what_each_has_done(version: int) -> None:
    expected = dict(FOUND)
    if version == 1:
        expected["loss"] = ("has a gradient of a", "has a gradient of b")
        del expected["heads"]  # gradients of a flat parameter are whole, so that ranks may use different parts of it
    for results in run_world(in_one_group, 2, version, timeout=200, state=False):
        for (number, case), (error, kept) in zip(CASES.items(), results, strict=True):
            if case not in expected:
                assert not error
                continue
            first, second = expected[case]
            assert f"  rank 0 {first}\n  rank 1 {second}\n" in error, (case, error)
            assert f"before step {number}, which was not taken; the ranks last agreed in step {number - 1}" in error
            assert kept
            assert "x + 0 * block(x)" in error


def alternate() -> str:
    """Micro batches that are reduced one by one, and whose heads the ranks use in another order."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for first in (True, False):
        used = first == (accelerator.process_index == 0)
        accelerator.backward(model(torch.ones(2, WIDTH), "heads", used).square().mean())
    try:
        optimizer.step()
    except DistributedOperationException as error:
        return str(error)
    return ""


def test_micro_batches_that_use_parameters_in_another_order_are_found() -> None:
    for error in run_world(alternate, 2, timeout=200, state=False):
        assert "in an earlier micro batch" in error


def save(directory: str) -> str:
    """The error of saving after an evaluation in which the ranks have called different units."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), project_dir=directory)
    model = accelerator.prepare(Net())
    with torch.no_grad():
        model(torch.ones(2, WIDTH), "branch", accelerator.process_index == 0)
    try:
        accelerator.save_state(directory)
    except DistributedOperationException as error:
        return str(error)
    return ""


def test_ranks_that_have_differed_save_no_state(tmp_path: Path) -> None:
    for error in run_world(save, 2, str(tmp_path / "state"), timeout=200, state=False):
        assert "before the state was saved" in error and "rank 1 gathers b" in error
    assert not (tmp_path / "state").exists()


def in_replicas() -> list[str]:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin())
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.no_grad():  # which replicas may do as often as they like
        for _ in range(1 + accelerator.process_index // 2):
            model(torch.ones(2, WIDTH), "branch", True)
    errors = []
    for first in (True, accelerator.process_index < 2):
        accelerator.backward(model(torch.ones(2, WIDTH), "branch", first).square().mean())
        try:
            optimizer.step()
        except DistributedOperationException as error:
            errors.append(str(error))
        optimizer.zero_grad()
    return errors


@pytest.mark.slow
def test_replicas_that_reduce_different_units_are_found() -> None:
    for errors in run_world(in_replicas, 4, timeout=300, state=False):
        assert len(errors) == 1 and "before step 2" in errors[0]
        assert "  rank 0 reduces a" in errors[0] or "  rank 0 gathers a" in errors[0]
