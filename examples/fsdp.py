"""Train a small Llama text classifier with DDP, FSDP 1, FSDP 2, or tensor parallelism and FSDP 2.

    pip install transformers
    accel launch --config_file examples/fsdp_configs/ddp.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/fsdp1.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/fsdp2.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/tp_fsdp.yaml examples/fsdp.py     # 4 processes: tp 2 x dp_shard 2

Only the configuration file determines how the model is sharded. `--batch_size` is the global batch size, so all
configurations train on the same batches to the same loss. The sentences are those of text_classification.py; the model
starts from random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import zlib
from collections.abc import Sequence

import torch
from text_classification import PACKAGES, Example, examples
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

MAX_WORDS = 40
VOCABULARY = 2048
PADDING = 0


def make_model(width: int, layers: int) -> nn.Module:
    """A Llama classifier with one score per package."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this example needs transformers: pip install transformers")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_WORDS,
        pad_token_id=PADDING,
        num_labels=len(PACKAGES),
    )
    return LlamaForSequenceClassification(config)


def tokenize(text: str) -> list[int]:
    """Token ids by hashing the words, which needs no vocabulary; 0 is padding."""
    return [
        1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)
        for word in re.findall(r"\w+|[^\w\s]", text.lower())[:MAX_WORDS]
    ]


def collate(batch: list[Example]) -> dict[str, torch.Tensor]:
    """Token ids and mask of shape (N, longest sentence), and labels of shape (N,)."""
    rows = [tokenize(text) for text, _ in batch]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PADDING).long(),
        "labels": torch.tensor([label for _, label in batch]),
    }


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, float, int]:
    """The mean loss, the accuracy, and the number of sentences."""
    model.eval()
    losses, correct = [], []
    for batch in loader:
        labels = batch.pop("labels")
        with torch.no_grad():
            scores = model(**batch).logits.float()
        metrics = functional.cross_entropy(scores, labels, reduction="none"), scores.argmax(dim=-1) == labels
        batch_losses, batch_correct = accelerator.gather_for_metrics(metrics)
        losses.append(batch_losses)
        correct.append(batch_correct)
    return torch.cat(losses).mean().item(), torch.cat(correct).float().mean().item(), len(torch.cat(correct))


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(arguments.seed)
    model = make_model(arguments.width, arguments.layers)
    train_set, test_set = examples(arguments.sentences)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    test_loader = DataLoader(test_set, batch_size=arguments.batch_size, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, eps=1e-6)

    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    # Parameters of FSDP 2 and tensor parallelism are DTensors.
    local = [item.to_local() if isinstance(item, DTensor) else item for item in model.parameters()]
    local_count = sum(parameter.numel() for parameter in local)
    accelerator.print(f"{accelerator.num_processes} processes, {local_count} parameters on rank 0")
    for _ in range(arguments.epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean_loss, accuracy, total = evaluate(accelerator, model, test_loader)
    if arguments.output_dir:
        accelerator.save_model(model, arguments.output_dir)
    accelerator.print(
        f"final loss: {mean_loss:.6f}, accuracy: {accuracy:.3f} on {total} sentences (chance: {1 / len(PACKAGES):.3f})"
    )
    accelerator.end_training()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs (default 3)")
    parser.add_argument(
        "--sentences",
        type=int,
        default=160,
        help="sentences per package, a quarter of them for testing (default 160)",
    )
    parser.add_argument("--batch_size", type=int, default=32, help="global batch size (default 32)")
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 8 (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="number of blocks (default 2)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output_dir", default="", help="where to save the weights (default: not saved)")
    arguments = parser.parse_args(argv)
    if arguments.epochs < 1 or arguments.sentences < 4:
        parser.error(f"--epochs {arguments.epochs} --sentences {arguments.sentences}: the minimum is 1 and 4")
    return arguments


if __name__ == "__main__":
    train(parse())
