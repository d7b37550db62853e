"""One step on a mesh, compared with one process of plain PyTorch: the loss and every gradient."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mesh_runs import VOCABULARY, build
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.core.local_part import local
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import PipelineParallelConfig
from accel.parallel.config import ParallelismConfig
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.random import set_seed

BATCH = 8


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Attributes:
        axes: such as "dp_shard 2 x tp 2".
        kind: a model of mesh_runs.
        length: tokens of a sequence.
        window: micro-batches of a step.
        fsdp: settings of FSDP.
        mesh: further settings of the mesh.
        pipeline: settings of the pipeline.
        note: what is special, for the table.
    """

    axes: str
    kind: str
    length: int = 8
    window: int = 1
    fsdp: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return {f"{axis.split()[0]}_size": int(axis.split()[1]) for axis in self.axes.split(" x ")}


def data(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (case.window * BATCH, case.length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def plain_step(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process."""
    model = build(case.kind)
    set_seed(5)
    rows = data(case)
    batches = [stacked(rows[begin : begin + BATCH]) for begin in range(0, len(rows), BATCH)]
    total = torch.stack([model(**batch).loss for batch in batches]).mean()
    total.backward()
    return total.item(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def mesh_step(case: Case, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of a mesh, the latter on rank 0."""
    settings = ParallelismConfig(**case.sizes, **case.mesh, pp_handler=PipelineParallelConfig(**case.pipeline))
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **case.fsdp)
    sharded = any(f"{axis}_size" in case.sizes for axis in ("dp_shard", "cp", "sp")) or case.fsdp
    accelerator = Accelerator(
        parallelism_config=settings,
        fsdp_plugin=fsdp if sharded else None,
        gradient_accumulation_steps=case.window,
        **options,
    )
    set_seed(5)
    model = accelerator.prepare(build(case.kind))
    loader = accelerator.prepare(DataLoader(data(case), batch_size=BATCH // settings.data_parallel_size))
    set_seed(5)
    losses = [step(accelerator, model, batch).item() for batch in batches_of(accelerator, loader, model)]
    gradients = whole_gradients(accelerator, model)
    accelerator.free_memory()
    return sum(losses) / len(losses), gradients


def batches_of(accelerator: Accelerator, loader: Any, model: nn.Module) -> Any:
    return accelerator.deepspeed_ulysses_dl_adapter(loader, model)


def step(accelerator: Accelerator, model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, labels = batch["input_ids"], batch["labels"]
    with (
        accelerator.accumulate(model),
        accelerator.maybe_context_parallel(
            buffers=[tokens, labels], buffer_seq_dims=[1, 1], no_restore_buffers={tokens, labels}
        ),
    ):
        loss = model(**batch).loss
        accelerator.backward(loss)
    return accelerator.reduce(loss.detach(), "mean")


def whole_gradients(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The full gradients: they take the place of the parameters, which are then gathered under the model's names."""
    names = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    for parameter in model.parameters():
        with torch.no_grad():
            own = local(parameter.data)
            own.copy_(torch.zeros_like(own) if parameter.grad is None else local(parameter.grad).view_as(own))
    assert not names, names
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def mesh_steps(cases: list[Case]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    return [mesh_step(case) for case in cases]


def steps_and_refusals(cases: list[Case], refused: list[Case]) -> tuple[list[Any], list[str]]:
    return mesh_steps(cases), [refusal(case) for case in refused]


def refusal(case: Case) -> str:
    """What the error of a case says is wrong; it says what to do in further sentences."""
    with context.isolated(), pytest.raises(ConfigurationError) as raised:
        mesh_step(case)
    return re.split(r"\.(?:\s|$)", str(raised.value))[0]


def deviation(found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> float:
    """The largest relative difference of the loss and of every gradient, by norms.

    A gradient that is zero but for rounding (of the biases of attention's keys) is compared with a thousandth of the
    norm of all gradients.
    """
    loss, gradients = expected
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    missing = set(gradients) - set(found[1])
    assert not missing, missing
    worst = abs(found[0] - loss) / abs(loss)
    for name, gradient in gradients.items():
        error = (found[1][name] - gradient).norm() / torch.maximum(gradient.norm(), whole * 1e-3)
        worst = max(worst, float(error))
    return worst
