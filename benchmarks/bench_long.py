"""Long sequences: packed documents against padded ones, the balance of their work over ranks, and the loss in chunks.

    python benchmarks/bench_long.py [--only packed|balance|loss]
    python benchmarks/bench_long.py --only loss --tokens 32768 --width 4096 --words 128256    the default on a GPU

packed: the documents of examples/packed_long_context.py train a small Llama, padded to the longest of a batch, and
packed into sequences, in one process and on two ranks with context parallelism. Tokens a second are those of documents.
balance: the work of the busiest of several ranks, relative to the mean, for sequences of documents with drawn lengths:
pairs of tokens that attend to each other, and blocks that flex attention computes. The target is for the median.
loss: a step computes the logits of all tokens, their loss and the gradients of hidden states and weights, in plain
PyTorch (``linear`` and ``cross_entropy``) and with ``chunked_causal_lm_loss``.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _measure
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from accel import Accelerator
from accel.parallel.documents import FLEX_BLOCK, Documents
from accel.utils import (
    ParallelismConfig,
    TorchContextParallelConfig,
    chunked_causal_lm_loss,
    set_seed,
)
from accel_state import devices

LOSS_TARGET = 1.05
BALANCE_TARGET = 1.1
SEQUENCES, BATCH, PADDED_BATCH, ROUNDS = 24, 2, 8, 3  # of packed documents; rows of a packed and of a padded batch
DRAWS = 10
LENGTHS = {"many short": 1 / 50, "few long": 1.0}  # the longest document as a share of the sequence

Batch = dict[str, torch.Tensor]


def packed_and_padded() -> tuple[list[Batch], list[Batch]]:
    """The same documents in batches of both kinds."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import packed_long_context as example

    sequences = example.packed(example.documents())
    chosen = random.Random(0).sample(sequences, SEQUENCES)
    packed = [
        {name: torch.stack([one[name] for one in chosen[at : at + BATCH]]) for name in chosen[0]}
        for at in range(0, SEQUENCES, BATCH)
    ]
    found = [document for one in chosen for document in _documents(one)]
    random.Random(1).shuffle(found)
    return packed, [_padded(found[at : at + PADDED_BATCH]) for at in range(0, len(found), PADDED_BATCH)]


def _documents(sequence: Batch) -> Iterator[torch.Tensor]:
    begins = (sequence["position_ids"] == 0).nonzero().flatten().tolist()
    for begin, end in zip(begins, [*begins[1:], len(sequence["input_ids"])], strict=True):
        if (sequence["labels"][begin + 1 : end] >= 0).any():  # otherwise it is padding
            yield sequence["input_ids"][begin:end]


def _padded(documents: list[torch.Tensor]) -> Batch:
    length = -(-max(map(len, documents)) // 4) * 4  # which two ranks with two pieces each divide
    rows = [functional.pad(document, (0, length - len(document))) for document in documents]
    labels = [functional.pad(document, (0, length - len(document)), value=-100) for document in documents]
    return {"input_ids": torch.stack(rows), "labels": torch.stack(labels)}


def train(cp_size: int) -> None:
    """Measure an epoch of both kinds in this process, and report it on the first rank."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(1)
    handler = TorchContextParallelConfig(cp_balance="documents") if cp_size > 1 else None
    mesh = ParallelismConfig(cp_size=cp_size, cp_handler=handler) if cp_size > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def epoch(batches: list[Batch]) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                inputs = {name: tensor.clone() for name, tensor in batch.items()}  # the block replaces their contents
                buffers = list(inputs.values())
                with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
                    accelerator.backward(model(**inputs, use_cache=False).loss)
                optimizer.step()
                optimizer.zero_grad()

        return run

    kinds = dict(zip(("packed", "padded"), packed_and_padded(), strict=True))
    times = _measure.in_turns(
        {name: epoch(batches) for name, batches in kinds.items()}, ROUNDS, warm_up=1, clock=time.perf_counter
    )
    if accelerator.is_main_process:
        used = sum(int((labels >= 0).sum()) for labels in (batch["labels"] for batch in kinds["padded"]))
        sizes = {name: sum(batch["input_ids"].numel() for batch in batches) for name, batches in kinds.items()}
        _measure.report(
            {name: (used / statistics.median(times[name]), 1 - used / sizes[name]) for name in kinds}
            | {"ratio": _measure.ratio(times, "padded", "packed")}
        )
    accelerator.end_training()


def show_packed() -> None:
    """Print tokens per second and the share of wasted work."""
    for size in (1, 2):
        figures = _measure.worker(sys.executable, __file__, "--worker", str(size), processes=size)
        _measure.heading(f"Documents of {SEQUENCES} sequences of 1024 tokens, cp_size {size}")
        for name in ("padded", "packed"):
            speed, waste = figures[name]
            _measure.row(name, f"{speed:,.0f} tokens/s", f"{waste:.1%} of the tokens are padding")
        _measure.row("packed, speed relative to padded", f"{figures['ratio']:.2f} x")


def drawn(length: int, longest: float, generator: random.Random) -> Documents:
    """Documents of one sequence, whose lengths are uniform in their logarithm."""
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, int(math.exp(generator.uniform(0, math.log(length * longest))))))
    return Documents(torch.repeat_interleave(torch.tensor(lengths)).unsqueeze(0))


def blocks(documents: Documents, order: torch.Tensor) -> torch.Tensor:
    """Blocks that flex attention computes on each rank."""
    first = (torch.arange(documents.ids.shape[1]) - documents.positions()[0]) // FLEX_BLOCK
    of_rows = order.unflatten(1, (-1, FLEX_BLOCK))
    return (of_rows // FLEX_BLOCK - first[of_rows].amin(2, keepdim=True) + 1).amax(2).sum(1).double()


def show_balance() -> None:
    """Print the largest work of a rank over the mean."""
    _measure.heading("The largest work of a rank over the mean: median and largest of drawn sequences")
    for length, sizes in ((4096, (2, 4, 8)), (32768, (2, 8, 32)), (131072, (8, 64))):
        for size in sizes:
            for kind, longest in LENGTHS.items():
                generator, found = random.Random(31), {"pairs": [0.0] * 0, "blocks": [0.0] * 0}
                for _ in range(DRAWS):
                    documents = drawn(length, longest, generator)
                    pairs = (documents.positions()[0] + 1)[documents.split_evenly(size)].sum(1).double()
                    computed = blocks(documents, documents.split_evenly(size, FLEX_BLOCK))
                    for name, loads in (("pairs", pairs), ("blocks", computed)):
                        found[name].append(float(loads.max() / loads.mean()))
                middle = {name: statistics.median(values) for name, values in found.items()}
                figures = ", ".join(f"{name} {middle[name]:.3f} ({max(found[name]):.3f})" for name in found)
                verdict = _measure.verdict(max(middle.values()), BALANCE_TARGET)
                _measure.row(f"{length} tokens, {size} ranks, {kind}", figures, verdict)


def peak_of(run: Callable[[], None], device: torch.device) -> int:
    """The largest sum of a step's allocations in bytes."""
    gc.collect()
    if device.type != "cpu":
        module: Any = devices.get(device.type).module
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        run()
        return int(module.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    total = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total)
    return peak


def show_loss(asked: argparse.Namespace, device: torch.device) -> None:
    """Print the peak of memory and the time of both losses."""
    gpu = device.type != "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(1, asked.tokens, asked.width, device=device, requires_grad=True)
    weight = torch.randn(asked.words, asked.width, device=device, requires_grad=True)
    labels = torch.randint(asked.words, (1, asked.tokens), device=device)

    def step(loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = loss_of()
            loss.backward()
            hidden.grad = weight.grad = None
            devices.get(device.type).synchronize()

        return run

    def on_all_logits() -> torch.Tensor:
        logits = functional.linear(hidden, weight).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    variants = {"plain": step(on_all_logits), "chunked": step(lambda: chunked_causal_lm_loss(hidden, weight, labels))}
    variants["plain again"] = variants["plain"]
    peaks = {name: peak_of(run, device) for name, run in variants.items()}
    times = _measure.in_turns(variants, asked.rounds, clock=time.perf_counter)
    _measure.heading(f"The loss of {asked.tokens} tokens by {asked.words} words, width {asked.width}, on {device.type}")
    for name in ("plain", "chunked"):
        _measure.row(f"{name}, peak of memory", f"{peaks[name] / 2**20:.0f} MiB")
    noise = _measure.ratio(times, "plain again", "plain")
    figure = _measure.ratio(times, "chunked", "plain")
    note = f"target: at most {LOSS_TARGET}: {_measure.verdict(figure, LOSS_TARGET)} (noise: {noise:.3f})"
    _measure.row("chunked, time relative to plain", f"{figure:.3f}", note)


def main() -> None:
    device = devices.detect().device(0)
    gpu = device.type != "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("packed", "balance", "loss"), help="one of the three")
    parser.add_argument("--tokens", type=int, default=32768 if gpu else 4096, help="tokens of a step of the loss")
    parser.add_argument("--width", type=int, default=4096 if gpu else 256, help="width of the hidden states")
    parser.add_argument("--words", type=int, default=128256 if gpu else 32000, help="size of the vocabulary")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each variant of the loss")
    parser.add_argument("--worker", type=int, help="train in this process with this cp_size (used internally)")
    asked = parser.parse_args()
    if asked.worker:
        train(asked.worker)
        return
    if asked.only in (None, "packed"):
        show_packed()
    if asked.only in (None, "balance"):
        show_balance()
    if asked.only in (None, "loss"):
        show_loss(asked, device)


if __name__ == "__main__":
    main()
