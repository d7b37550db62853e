"""Train a small Llama to tell which package of Python's standard library a sentence comes from: whole, sharded, or on a
mesh.

    pip install transformers
    accel launch --config_file examples/fsdp_configs/ddp.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/fsdp1.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/fsdp2.yaml examples/fsdp.py
    accel launch --config_file examples/fsdp_configs/tp_fsdp.yaml examples/fsdp.py     # 4 processes: 2 divide each
    layer, 2 the data

The configuration file alone says how the model is divided: nothing here knows of it. `--batch_size` is that of all
processes together, so that every file trains on the same batches, to the same loss. The sentences are those of
text_classification.py; the model starts from random weights, so nothing is downloaded.
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
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

MAX_WORDS = 40
VOCABULARY = 2048
PADDING = 0


def make_model(width: int, layers: int) -> nn.Module:
    """A Llama that reads words and ends in one score for each package."""
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


def words_of(text: str) -> list[int]:
    """A number from 1 on for each word: its checksum, so that there is no vocabulary to agree on."""
    return [
        1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)
        for word in re.findall(r"\w+|[^\w\s]", text.lower())[:MAX_WORDS]
    ]


def collate(batch: list[Example]) -> dict[str, torch.Tensor]:
    """Words of shape (N, longest of the batch), their mask, and labels of shape (N,)."""
    rows = [words_of(text) for text, _ in batch]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PADDING).long(),
        "labels": torch.tensor([label for _, label in batch]),
    }


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, float, int]:
    """The mean loss, the share of right answers, and the number of sentences that they were measured on."""
    model.eval()
    losses, right = [], []
    for batch in loader:
        labels = batch.pop("labels")
        with torch.no_grad():
            scores = model(**batch).logits.float()
        of_each = functional.cross_entropy(scores, labels, reduction="none"), scores.argmax(dim=-1) == labels
        for found, gathered in zip((losses, right), accelerator.gather_for_metrics(of_each), strict=True):
            found.append(gathered)
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item(), len(torch.cat(right))


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(arguments.seed)
    model = make_model(arguments.width, arguments.layers)
    train_set, test_set = examples(arguments.sentences)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    test_loader = DataLoader(test_set, batch_size=arguments.batch_size, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, eps=1e-6)

    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    held = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in model.parameters())
    accelerator.print(f"{accelerator.num_processes} processes, {held} parameters on the first")
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
        f"final loss: {mean_loss:.6f}, accuracy: {accuracy:.3f} on {total} sentences (guessing: "
        f"{1 / len(PACKAGES):.3f})"
    )
    accelerator.end_training()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training sentences (default 3)")
    parser.add_argument(
        "--sentences",
        type=int,
        default=160,
        help="sentences of each package, a quarter of them to test on (default 160)",
    )
    parser.add_argument(
        "--batch_size", type=int, default=32, help="sentences in a batch of all processes together (default 32)"
    )
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 8 (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model (default 2)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order (default 0)")
    parser.add_argument("--output_dir", default="", help="where to save the weights; by default they are not kept")
    arguments = parser.parse_args(words)
    if arguments.epochs < 1 or arguments.sentences < 4:
        parser.error(
            f"--epochs {arguments.epochs} --sentences {arguments.sentences}: give at least 1 epoch and 4 sentences"
        )
    return arguments


if __name__ == "__main__":
    train(parse())
