"""A complete language modelling run: everything that a training script for a cluster needs.

    accel launch --cpu --num_processes 2 examples/complete_nlp_example.py --output_dir runs/nlp

A small Llama learns the Zen of Python, line by line. The losses are weighted by tokens over accumulation windows and
ranks, weights are decayed except norms and biases, and the rest is as in complete_cv_example.py: clipping, a schedule
with warm-up, trackers, checkpoints, resuming, and exported weights that `from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator, ProjectConfiguration
from accel.utils import set_seed

PADDING, IGNORED = 0, -100


def lines() -> list[torch.Tensor]:
    """The Zen of Python as sequences of bytes."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = codecs.decode(this.s, "rot13")
    return [torch.tensor(list(line.encode())) for line in text.split("\n") if len(line) > 1]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PADDING).long(),
        "labels": tokens.masked_fill(tokens == PADDING, IGNORED),
    }


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of all tokens, and their number."""
    targets = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def perplexity(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses, counts = [], []
    for batch in loader:
        with torch.no_grad():
            targets = batch["labels"][:, 1:]
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            # One loss a line, so that gather_for_metrics can drop repeated lines.
            loss = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        loss, count = accelerator.gather_for_metrics((loss.sum(1), (targets != IGNORED).sum(1)))
        losses.append(loss)
        counts.append(count)
    return math.exp(torch.cat(losses).sum().item() / torch.cat(counts).sum().item())


def train(options: argparse.Namespace) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        log_with=options.log_with,
        project_config=ProjectConfiguration(options.output_dir, automatic_checkpoint_naming=True, total_limit=2),
        save_on_signal=True,
    )
    set_seed(options.seed)
    accelerator.init_trackers("zen", config=vars(options))
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=PADDING,
    )
    model = LlamaForCausalLM(config)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=options.lr
    )
    loader = DataLoader(lines(), options.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(lines(), options.batch_size, collate_fn=collate)
    steps = max(1, options.epochs * len(loader) // options.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.lr, total_steps=steps + 1, pct_start=0.1)
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, loader, test_loader
    )
    loader = accelerator.prepare_data_loader(loader)  # the same; to type checkers it now has `iteration`

    if accelerator.resume():
        accelerator.print(f"resuming in epoch {loader.iteration}")
    before = perplexity(accelerator, model, test_loader)
    for epoch in range(loader.iteration, options.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss, count = loss_sum(model, batch)
                accelerator.backward(loss, num_items=count, reduction="sum")
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.detach() / count, "epoch": epoch})
        if epoch + 1 == options.epochs // 2:
            accelerator.save_state()
    after = perplexity(accelerator, model, test_loader)
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{options.output_dir}/final",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state_dict,
    )
    accelerator.end_training()
    accelerator.print(f"perplexity: {before:.1f} before, {after:.1f} after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/nlp", help="default: runs/nlp")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=2, help="per process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_with", nargs="*", default=["jsonl"], help="trackers, or all (default: jsonl)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
