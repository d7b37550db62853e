"""Two models with DeepSpeed: a student that learns from a frozen teacher, and two models trained together.

    pip install --find-links dist 'accel[deepspeed]>=1.0' transformers
    accel launch --cpu --num_processes 2 --use_deepspeed examples/deepspeed_models.py --task distillation
    accel launch --cpu --num_processes 2 --use_deepspeed examples/deepspeed_models.py --task disjoint

Each model has its own configuration (examples/deepspeed_configs): the student trains at stage 2 with DeepSpeed's
optimizer and scheduler; the teacher is sharded at stage 3 while it is loaded. The sequences are random, so nothing is
downloaded; the class of a sequence is its most frequent token.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel.utils import DeepSpeedPlugin, broadcast_object_list
from accel.utils.deepspeed import DummyOptim, DummyScheduler, get_active_deepspeed_plugin

CONFIGS = Path(__file__).parent / "deepspeed_configs"
CLASSES, LENGTH, BATCH = 4, 12, 16


class Sequences(Dataset):
    """Random token sequences; the most frequent token, one of the first ``CLASSES``, is the class."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        noise = torch.randint(CLASSES, 32, (count, LENGTH), generator=generator)
        marked = torch.rand(count, LENGTH, generator=generator) < 0.4
        self.tokens = torch.where(marked, self.labels[:, None], noise)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make(width: int, layers: int, seed: int) -> nn.Module:
    """A small Transformers classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=32,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def joint_loss(teacher: nn.Module, student: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The student's loss plus the KL divergence from the teacher's probabilities."""
    with torch.no_grad():
        target = teacher(**batch).logits.float().softmax(dim=-1)
    output = student(**batch)
    return output.loss + nn.functional.kl_div(output.logits.float().log_softmax(dim=-1), target, reduction="batchmean")


def distillation(steps: int) -> list[float]:
    """One Accelerator with two plugins; a model uses the plugin that is selected when it is prepared."""
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=str(CONFIGS / "student_zero2.json")),
        "teacher": DeepSpeedPlugin(hf_ds_config=str(CONFIGS / "teacher_zero3.json")),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    assert get_active_deepspeed_plugin(accelerator.state) is plugins["student"] is accelerator.deepspeed_plugin
    student = make(16, 1, seed=1)
    optimizer = DummyOptim(student.parameters(), lr=5e-3)
    scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=4)
    loader = DataLoader(Sequences(steps * BATCH), batch_size=BATCH // accelerator.num_processes)
    student, optimizer, scheduler, loader = accelerator.prepare(student, optimizer, scheduler, loader)

    folder = broadcast_object_list([tempfile.mkdtemp(prefix="accel-teacher-")])[0]
    if accelerator.is_main_process:
        # Stands in for an existing checkpoint.
        with plugins["teacher"].zero3_init_context_manager(enable=False):
            make(32, 2, seed=2).save_pretrained(folder)
    accelerator.wait_for_everyone()
    accelerator.state.select_deepspeed_plugin("teacher")
    from transformers import BertForSequenceClassification

    teacher = accelerator.prepare(BertForSequenceClassification.from_pretrained(folder))
    teacher.eval()
    student.train()
    losses = []
    for batch in loader:
        loss = joint_loss(teacher, student, batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    accelerator.print(
        f"teacher: {sum(p.ds_numel for p in teacher.parameters())} parameters, sharded",
        f"student: {scheduler.get_last_lr()}",
    )
    accelerator.end_training()
    return losses


def disjoint(steps: int) -> list[float]:
    """Two Accelerators that share one state, each with its own engine and optimizer."""
    plugins = {"first": DeepSpeedPlugin(zero_stage=1), "second": DeepSpeedPlugin(zero_stage=3)}
    first_accelerator = Accelerator(deepspeed_plugins=plugins)
    second_accelerator = Accelerator()

    first_accelerator.state.select_deepspeed_plugin("first")
    first = make(16, 1, seed=1)
    first_optimizer = torch.optim.AdamW(first.parameters(), lr=5e-3)
    first_scheduler = torch.optim.lr_scheduler.StepLR(first_optimizer, 10, 0.5)
    loader = DataLoader(Sequences(steps * BATCH), batch_size=BATCH // first_accelerator.num_processes)
    first, first_optimizer, first_scheduler, loader = first_accelerator.prepare(
        first, first_optimizer, first_scheduler, loader
    )

    second_accelerator.state.select_deepspeed_plugin("second")
    with plugins["second"].zero3_init_context_manager(enable=False):
        second = make(24, 1, seed=3)
    second_optimizer = torch.optim.SGD(second.parameters(), lr=5e-2)
    second, second_optimizer = second_accelerator.prepare(second, second_optimizer)

    losses = []
    for batch in loader:
        first_loss = first(**batch).loss
        first_accelerator.backward(first_loss)
        first_optimizer.step()
        first_scheduler.step()
        first_optimizer.zero_grad()

        second_loss = second(**batch).loss
        second_accelerator.backward(second_loss)
        second_optimizer.step()
        second_optimizer.zero_grad()
        both = torch.stack([first_loss.detach(), second_loss.detach()])
        losses += first_accelerator.reduce(both, reduction="mean").tolist()
    second_accelerator.free_memory()
    first_accelerator.end_training()
    return losses


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--task",
        choices=("distillation", "disjoint"),
        default="distillation",
        help="the task (default distillation)",
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse()
    from transformers.utils import logging

    logging.disable_progress_bar()
    task = {"distillation": distillation, "disjoint": disjoint}[arguments.task]
    print("losses:", *(f"{loss:.6f}" for loss in task(arguments.steps)))
