"""Generation with all layers on the disk: 64 sequences in one batch, against one sequence after another.

    python benchmarks/bigmodel_batch.py [--gigabytes 0.6]

scripts/bench bigmodel runs it after bench_bigmodel.py. Each step of a batch walks the blocks once for all sequences.
The files stay in the page cache, where walking them costs least; tokens are compared with those of the model in memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure
import torch

SEQUENCES, PROMPT, NEW_TOKENS, ROUNDS = 64, 4, 8, 5
ALONE = 2  # sequences that are generated one after another in a round
TARGET = 8.0
LAYERS, WIDTH = 8, 1024


def tokens_a_second(model: Any, prompts: torch.Tensor) -> tuple[float, torch.Tensor]:
    begin = time.perf_counter()
    tokens = model.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[:, prompts.shape[1] :].numel() / (time.perf_counter() - begin), tokens


def alone(model: Any, prompts: torch.Tensor) -> float:
    """Tokens a second of some sequences, one after another."""
    return statistics.harmonic_mean([tokens_a_second(model, prompt[None])[0] for prompt in prompts])


@torch.no_grad()
def main(gigabytes: float) -> None:
    """Print the table and compare the figure with the target."""
    import transformers

    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    torch.set_num_threads(1)
    config = _measure.llama_config(gigabytes, LAYERS, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        plain = transformers.LlamaForCausalLM(config).eval()
        plain.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        with init_empty_weights():
            model = transformers.LlamaForCausalLM(config).eval()
        load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
        prompts = torch.randint(1, 1000, (SEQUENCES, PROMPT))
        tokens_a_second(model, prompts[:1])
        ratios: dict[str, list[float]] = {"in memory": [], "on disk": []}
        speeds: dict[str, list[float]] = {"one": [], "many": []}
        equal = True
        for turn in range(ROUNDS):
            found = {}
            for place, kind in (("in memory", plain), ("on disk", model))[:: 1 if turn % 2 else -1]:
                one = alone(kind, prompts[ALONE * turn :][:ALONE])
                many, found[place] = tokens_a_second(kind, prompts)
                ratios[place].append(many / one)
                if kind is model:
                    speeds["one"].append(one)
                    speeds["many"].append(many)
            equal = equal and torch.equal(found["on disk"], found["in memory"])
    _measure.heading(f"A model of {size / 1e9:.2f} GB on disk, {NEW_TOKENS} tokens after prompts of {PROMPT}")
    _measure.row("accel: one sequence after another", f"{statistics.median(speeds['one']):.2f} tokens/s")
    _measure.row(f"accel: {SEQUENCES} sequences in a batch", f"{statistics.median(speeds['many']):.1f} tokens/s")
    figure = statistics.median(ratios["on disk"])
    note = f"{statistics.median(ratios['in memory']):.1f} x with the model in memory; "
    note += f"target: at least {TARGET:g}: {_measure.verdict(-figure, -TARGET)}"
    _measure.row("accel: tokens of a batch against one by one", f"{figure:.1f} x", note)
    _measure.row("accel: tokens equal to those in memory", "yes" if equal else "NO")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.6, help="size of the model (10**9 bytes)")
    main(parser.parse_args().gigabytes)
