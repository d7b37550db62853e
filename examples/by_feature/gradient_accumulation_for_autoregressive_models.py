"""Accumulate gradients over sequences of different lengths, and get those of one large batch.

    accel launch --cpu --num_processes 2 examples/by_feature/gradient_accumulation_for_autoregressive_models.py

The mean of the mean losses of micro batches is not the mean over all tokens if the micro batches contain different
numbers of tokens. `backward(..., num_items=...)` scales each loss by its share of the tokens of the window, over all
ranks. The script compares the gradients with those of plain PyTorch on all sequences at once.
"""

from __future__ import annotations

import torch
from common import CharModel, zen
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed

IGNORED = -100


def sequences() -> list[torch.Tensor]:
    """The first 16 lines of the Zen of Python."""
    text = zen().tolist()
    lines = "".join(map(chr, text)).split("\n")
    return [torch.tensor(list(line.encode())) for line in lines if len(line) > 1][:16]


def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens and the tokens that follow them."""
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


def loss_sum(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=16)  # until the end of the loader
    set_seed(0)
    model = CharModel()
    plain = CharModel()
    plain.load_state_dict(model.state_dict())
    model, loader = accelerator.prepare(model, DataLoader(sequences(), batch_size=2, collate_fn=collate))

    for tokens, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(
                loss_sum(model, tokens, targets), num_items=(targets != IGNORED).sum(), reduction="sum"
            )

    tokens, targets = collate(sequences())
    plain.to(accelerator.device)
    tokens, targets = tokens.to(accelerator.device), targets.to(accelerator.device)
    (loss_sum(plain, tokens, targets) / (targets != IGNORED).sum()).backward()
    differences = [
        (ours.grad - theirs.grad).abs().max().item()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    accelerator.print(f"{len(loader)} micro batches per process, {int((targets != IGNORED).sum())} tokens")
    accelerator.print(f"largest difference to one batch: {max(differences):.7f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
