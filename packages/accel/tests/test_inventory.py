"""What else a run holds and continues with; the table of docs/guides/checkpoints.md names the other tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel import Accelerator
from accel.kwargs.handlers import GradScalerKwargs
from accel_state import context
from accel_state.testing import run_world

ROOT = Path(__file__).parents[3]
STEPS = 6


def run(folder: Path, save_at: int, resume: bool) -> list[Any]:
    """A run with a loss scale that changes, an average of the weights, and a schedule that follows the loss."""
    with context.isolated():
        handler = GradScalerKwargs(init_scale=2.0**20, growth_interval=1, growth_factor=4.0)
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
        torch.manual_seed(7 if resume else 0)
        net: Any = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6))
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
        schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        model, optimizer = accelerator.prepare(net, optimizer)
        accelerator.register_for_checkpointing(average, schedule)
        if resume:
            accelerator.load_state(folder)
        scales = []
        for step in range(save_at if resume else 0, STEPS):
            if step == save_at and not resume:
                accelerator.save_state(folder)
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(accelerator.reduce(loss.detach(), "mean"))
            average.update_parameters(net)
            scales.append((accelerator.scaler.get_scale(), optimizer.param_groups[0]["lr"]))
        if not resume:
            assert len({scale for scale, _ in scales}) > 2, scales
        # Not the running statistics in the average: registered objects are saved as rank 0 has them.
        weights = [*net.state_dict().values(), *average.parameters()]
        return [scales[-1], optimizer.steps_taken, [value.detach().clone() for value in weights]]


def run_all(folder: Path) -> list[str]:
    wrong = []
    for save_at in range(1, STEPS):
        place = folder / str(save_at)
        expected, found = run(place, save_at, False), run(place, save_at, True)
        if expected[:2] != found[:2] or not all(map(torch.equal, expected[2], found[2])):
            wrong.append(f"saved at {save_at}: {expected[:2]} {found[:2]}")
    return wrong


def test_a_scaler_and_averaged_weights_continue_at_every_step(tmp_path: Path) -> None:
    for ranks in (1, 2):
        for wrong in run_world(run_all, ranks, tmp_path / str(ranks)):
            assert not wrong, "\n".join(wrong)


def test_the_tests_that_the_inventory_names_exist() -> None:
    text = (ROOT / "docs/guides/checkpoints.md").read_text(encoding="utf-8")
    table = text.split("### Inventory")[1].split("\n## ")[0]
    named = re.findall(r"`([\w-]+/tests/test_\w+\.py)::(test_\w+)`", table)
    assert len(named) >= 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / "packages" / path).read_text(encoding="utf-8"), (path, name)
