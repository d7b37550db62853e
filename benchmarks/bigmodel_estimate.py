"""The speed that `accel estimate-memory --offload` predicts, against runs of the same model and placement.

    python benchmarks/bigmodel_estimate.py [--gigabytes 1.0]

scripts/bench bigmodel runs it after bench_bigmodel.py. Prediction and run are measured in turns, because other
processes of a shared machine slow both.
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

STEPS, ROUNDS = 12, 3
TARGET = 0.15
LAYERS, WIDTH = 12, 1536


def step_seconds(model: Any, sequences: int) -> float:
    """The mean step of generation with a cache, without the first two."""
    tokens, cache, seconds = torch.ones(sequences, 4, dtype=torch.int64), None, []
    for _ in range(STEPS):
        begin = time.perf_counter()
        output = model(tokens, past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
        cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
    return statistics.mean(seconds[2:])


@torch.no_grad()
def main(gigabytes: float) -> None:
    """Print the table and compare the figures with the target."""
    import transformers

    from accel_bigmodel import estimate_offload, init_empty_weights, load_checkpoint_and_dispatch

    torch.set_num_threads(1)
    inner = int(gigabytes * 1e9 / 4 / LAYERS / WIDTH / 3) // 64 * 64
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=WIDTH, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=12,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        _measure.heading(f"Predicted and measured steps of a model of {size / 1e9:.2f} GB on one core")
        for share, sequences in ((0.25, 1), (0.5, 1), (0.75, 1), (0.5, 8)):
            memory = int(share * size)
            predicted, ran = [], []
            for _ in range(ROUNDS):
                predicted.append(estimate_offload(folder, memory, sequences).step_seconds)
                with init_empty_weights():
                    model = transformers.LlamaForCausalLM(config).eval()
                options: dict[str, Any] = {"device_map": "sequential", "max_memory": {"cpu": memory}}
                ran.append(step_seconds(load_checkpoint_and_dispatch(model, folder, **options), sequences))
            error = statistics.median(one / other for one, other in zip(predicted, ran, strict=True)) - 1
            note = f"{statistics.median(predicted):.3f} s predicted, {statistics.median(ran):.3f} s measured"
            note += f"; target: at most {TARGET:.0%}: {_measure.verdict(abs(error), TARGET)}"
            label = f"accel: {share:.0%} in memory, {sequences} sequence{'s' if sequences > 1 else ''}: error"
            _measure.row(label, f"{error:+.1%}", note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (10**9 bytes)")
    main(parser.parse_args().gigabytes)
