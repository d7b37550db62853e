"""The speed that `accel estimate-memory --offload` predicts, against runs of the same model and placement.

    python benchmarks/bigmodel_estimate.py [--gigabytes 1.0]

scripts/bench bigmodel runs it after bench_bigmodel.py. Prediction and run are measured in turns, because other
processes of a shared machine slow both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure
import torch

STEPS, ROUNDS = 9, 5
TARGET = 0.15
LAYERS, WIDTH = 12, 1536
# Memory as a share of the weights, and sequences in a batch. The least one has room for one layer; a part of the rest
# would be in memory, and its pages cannot be dropped from the page cache.
COLD = (0.1, 1)
SETTINGS = ((2.0, 1), (0.5, 1), (0.5, 8), COLD)


def step_seconds(model: Any, sequences: int, folder: str) -> tuple[float, float]:
    """The mean step of generation with a cache, without the first two; and the first one, from the disk."""
    tokens, cache, seconds = torch.ones(sequences, 1, dtype=torch.int64), None, []
    gc.collect()  # pages that the models of the prediction have mapped would stay in the page cache
    _measure.drop_from_page_cache(folder)
    for _ in range(STEPS):
        begin = time.perf_counter()
        output = model(tokens, past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
        cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
    return statistics.mean(seconds[2:]), seconds[0]


@torch.no_grad()
def main(gigabytes: float) -> None:
    """Print the table and compare the figures with the target."""
    import transformers

    from accel_bigmodel import estimate_offload, init_empty_weights, load_checkpoint_and_dispatch

    torch.set_num_threads(1)
    config = _measure.llama_config(gigabytes, LAYERS, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        _measure.heading(f"Predicted and measured steps of a model of {size / 1e9:.2f} GB on one core")
        pairs: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            for share, sequences in SETTINGS:
                memory = int(share * size)
                estimate = estimate_offload(folder, memory, sequences)
                with init_empty_weights():
                    model = transformers.LlamaForCausalLM(config).eval()
                options: dict[str, Any] = {"device_map": "sequential", "max_memory": {"cpu": memory}}
                load_checkpoint_and_dispatch(model, folder, **options)
                step, cold = step_seconds(model, sequences, folder)
                del model
                label = f"{min(share, 1):.0%} in memory, {sequences} row{'s' if sequences > 1 else ''}"
                pairs.setdefault(label, []).append((estimate.step_seconds, step))
                if (share, sequences) == COLD:
                    pairs.setdefault(f"{label}, from the disk", []).append((estimate.first_step_seconds, cold))
    for label, found in sorted(pairs.items()):
        error = statistics.median(predicted / ran for predicted, ran in found) - 1
        predicted, ran = (statistics.median(side) for side in zip(*found, strict=True))
        note = f"{predicted:.3f} s predicted, {ran:.3f} s measured"
        note += f"; target: at most {TARGET:.0%}: {_measure.verdict(abs(error), TARGET)}"
        _measure.row(f"accel: {label}", f"{error:+.1%}", note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (10**9 bytes)")
    main(parser.parse_args().gigabytes)
