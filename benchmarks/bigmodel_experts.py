"""Mixture-of-experts models with the experts on the disk: seconds per token, against a walk over all experts.

    python benchmarks/bigmodel_experts.py [--gigabytes 1.0]

scripts/bench bigmodel runs it after bench_bigmodel.py. Models of Transformers with random weights, saved by
save_pretrained, generate greedily, with memory for a quarter of the experts' bytes: cache_experts() in accel. "All
experts" is the same model with preload_module_classes, which loads the experts of a layer as a whole. Before each token
the files are dropped from the page cache, because a machine with memory for a quarter of the experts has none to cache
them all; the last rows have them in the page cache. The reference generates in a process of its own, with the same
files and placement.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import torch
from safetensors.torch import save_file

TOKENS, COLD_TOKENS, ROUNDS = 10, 3, 5
TARGET = 3.0
LAYERS = 4


def config_of(name: str, gigabytes: float) -> Any:
    """A configuration whose experts have this size."""
    import transformers

    words = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    experts = 8 if name == "Mixtral" else 32
    inner = int(gigabytes * 1e9 / LAYERS / experts / 1024 / 3 / 4) // 64 * 64
    if name == "Mixtral":
        chosen = {"num_local_experts": experts, "num_experts_per_tok": 2, "intermediate_size": inner}
        return transformers.MixtralConfig(**words, **sizes, **chosen)
    chosen = {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": inner}
    return transformers.Qwen2MoeConfig(**words, **sizes, **chosen, shared_expert_intermediate_size=1024)


def kind_of(name: str) -> Any:
    import transformers

    return getattr(transformers, {"Mixtral": "MixtralForCausalLM", "Qwen2-MoE": "Qwen2MoeForCausalLM"}[name])


def device_map_of(model: torch.nn.Module, prefix: str = "") -> dict[str, str]:
    """Experts on the disk, and the rest in memory; without nested entries, for the reference."""
    flat: dict[str, str] = {}
    for name, child in model.named_children():
        path = prefix + name
        if path.endswith("mlp.experts"):
            flat[path] = "disk"
        elif any(inside.endswith("mlp.experts") for inside, _ in child.named_modules(prefix=path)):
            flat |= device_map_of(child, f"{path}.")
        else:
            flat[path] = "cpu"
    return flat


def timed_tokens(model: Any, before: Callable[[], object], count: int = TOKENS) -> tuple[list[int], list[float]]:
    """Greedy tokens after a prompt, and the seconds of each step after the first."""
    tokens = torch.arange(1, 9)[None]
    cache, chosen, seconds = None, [], []
    for _ in range(count):
        before()
        begin = time.perf_counter()
        output = model(tokens, past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
        cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
        chosen.append(int(tokens))
    return chosen, seconds[1:]


def compare(models: dict[str, Any], folder: Path, is_cold: bool, rounds: int) -> tuple[dict[str, float], bool]:
    """The median seconds of a token of each model, interleaved, and whether all generate the same tokens."""

    def before() -> None:
        if is_cold:
            _measure.drop_from_page_cache(folder)

    seconds: dict[str, list[float]] = {name: [] for name in models}
    generated = []
    for _ in range(rounds):
        for name, model in models.items():
            tokens, steps = timed_tokens(model, before, COLD_TOKENS if is_cold else TOKENS)
            seconds[name].append(statistics.median(steps))
            generated.append(tokens)
    return {name: statistics.median(values) for name, values in seconds.items()}, len(set(map(tuple, generated))) == 1


@torch.no_grad()
def work(library: str, name: str, folder: Path) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    kind = kind_of(name)
    with torch.device("meta"):
        options: dict[str, Any] = {"device_map": device_map_of(kind(kind.config_class.from_pretrained(folder)))}
    models: dict[str, Any] = {}
    if library == "reference":
        models["reference"] = kind.from_pretrained(folder, **options, offload_folder=folder / "offload").eval()
    else:
        from accel_bigmodel import cache_experts, init_empty_weights, load_checkpoint_and_dispatch

        in_memory = kind.from_pretrained(folder).eval()
        expected, steps = timed_tokens(in_memory, lambda: None)
        # Stacked as the model holds them, so that the walk over all of them reads them in place.
        stacked = folder / "stacked.safetensors"
        save_file(in_memory.state_dict(), stacked)
        experts = [in_memory.get_submodule(f"model.layers.{layer}.mlp.experts") for layer in range(LAYERS)]
        total = sum(parameter.nbytes for module in experts for parameter in module.parameters())
        rest = sum(parameter.nbytes for parameter in in_memory.parameters()) - total
        count = experts[0].num_experts
        options["max_memory"] = {"cpu": rest + total // 4}
        del in_memory, experts
        whole = [f"{kind.__name__.removesuffix('ForCausalLM')}Experts"]
        for label, checkpoint, classes in (("accel", folder, None), ("all experts", stacked, whole)):
            with init_empty_weights():
                empty = kind(kind.config_class.from_pretrained(folder)).eval()
            models[label] = load_checkpoint_and_dispatch(empty, checkpoint, **options, preload_module_classes=classes)
        kept = cache_experts(models["accel"], total / 4)
        figures = {"bytes": total, "kept": kept, "experts": count, "memory": statistics.median(steps)}
        figures["equal"] = timed_tokens(models["accel"], lambda: None)[0] == expected
    cold, same_cold = compare(models, folder, True, ROUNDS)
    cached, same_cached = compare(models, folder, False, ROUNDS)
    if library == "reference":
        _measure.report({"cold": cold, "cached": cached})
    else:
        _measure.report({**figures, "cold": cold, "cached": cached, "same": same_cold and same_cached})


def main(gigabytes: float, with_reference: bool) -> None:
    """Print the table and compare the figures with the target."""
    reference = _measure.reference_python() if with_reference else None
    for name in ("Mixtral", "Qwen2-MoE"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            kind_of(name)(config_of(name, gigabytes)).save_pretrained(folder, max_shard_size="500MB")
            words = ("--name", name, "--folder", folder)
            figures = _measure.worker(sys.executable, __file__, "--library", "accel", *words, timeout=900)
            theirs = (
                _measure.worker(reference, __file__, "--library", "reference", *words, timeout=900) if reference else {}
            )
        _measure.heading(
            f"{name}: {figures['bytes'] / 1e9:.2f} GB of experts on disk, {figures['kept']} of {figures['experts']} of "
            "each layer kept in memory"
        )
        for state in ("cold", "cached"):
            ours, walk = figures[state]["accel"], figures[state]["all experts"]
            where = "from the disk" if state == "cold" else "from the page cache"
            note = f"{walk:.3f} s with all experts"
            if reference:
                note += f", {theirs[state]['reference']:.3f} s reference"
            if state == "cached":
                note += f", {figures['memory']:.3f} s in memory"
            _measure.row(f"accel: a token, {where}", f"{ours:.3f} s", note)
            note = f"target: at least {TARGET:g}: {_measure.verdict(-walk / ours, -TARGET)}"
            label = f"accel: {name}, {where}, against all experts"
            _measure.row(label, f"{walk / ours:.1f} x", note)
        equal = figures["equal"] and figures["same"]
        _measure.row("accel: tokens equal to those in memory", "yes" if equal else "NO")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the experts (10**9 bytes)")
    parser.add_argument("--without-reference", action="store_true", help="measure only accel")
    parser.add_argument("--library", help="measure this library in this process (used internally)")
    parser.add_argument("--name")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    if chosen.library:
        work(chosen.library, chosen.name, chosen.folder)
    else:
        main(chosen.gigabytes, not chosen.without_reference)
