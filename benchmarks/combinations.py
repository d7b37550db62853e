"""Train drawn combinations of strategies, models and features, and compare each with one process of plain PyTorch.

    python benchmarks/combinations.py --draws 500 --results combinations.jsonl
    python benchmarks/combinations.py --draws 40 --seed 7 --only tp       strategies with a tp axis
    python benchmarks/combinations.py --number 17 --seed 7                one of them, with everything that it found
    python benchmarks/combinations.py --table combinations.jsonl          the table of a file

A draw is equal if losses, gradient norms and weights are those of one process within the limits below, or refused if
all ranks raise a ConfigurationError (a CheckpointError for a state that another strategy cannot load). Anything else
(another result, another error, a crash, a hang) is printed, and the exit code is 1. Draws follow from the printed seed
and their number, so that each can be repeated alone.

Ranks are forked from a server that has imported everything; worlds of one size train several draws one after another.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _combination_runs import BLOCKS, TWO_LOADERS, Draw, Found, Setup, plain, run_draws, train

from accel.parallel.axis_settings import SCHEDULES
from accel_state import context
from accel_state.testing import WorldError, preload, run_world

SETUPS: dict[int, Sequence[str]] = {
    1: ("single",),
    2: (
        *("ddp", "ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
        *("tp2", "cp2", "sp2", "pp2", "dp_replicate2"),
    ),
    4: (
        *("ddp", "fsdp1", "fsdp2", "zero1", "zero3", "dp_replicate2-dp_shard2", "dp_shard2-tp2", "dp_replicate2-tp2"),
        *("dp_shard2-cp2", "dp_replicate2-cp2", "dp_shard2-sp2", "tp2-cp2", "tp2-sp2", "pp2-dp_shard2", "pp2-tp2"),
        *("pp2-dp_replicate2", "pp2-cp2", "pp2-sp2", "cp4", "pp4", "tp4"),
    ),
}
# Experts over ranks that the other axes have already; "ep" does not multiply them.
EXPERT_SETUPS: dict[int, Sequence[str]] = {
    2: ("dp_shard2-ep2", "tp2-ep2", "cp2-ep2"),
    4: (
        *("dp_shard4-ep2", "dp_shard4-ep4", "dp_shard2-tp2-ep2", "dp_shard2-tp2-ep4", "dp_shard2-cp2-ep2"),
        *("dp_replicate2-dp_shard2-ep2", "pp2-dp_shard2-ep2", "pp2-cp2-ep2", "tp4-ep2"),
    ),
}
MODELS = ("llama", "gpt2", "qwen2", "mistral", "batchnorm")
MIXTURES = ("mixtral", "qwen3_moe")
FEATURES = {
    **{"frozen": 0.15, "tied": 0.2, "lora": 0.15, "masks": 0.2, "packed": 0.08, "num_items": 0.15, "dropout": 0.08},
    **{"checkpointing": 0.12, "fsdp checkpointing": 0.12, "compiled": 0.06, "dynamo": 0.05, "dynamo blocks": 0.05},
    **{"local sgd": 0.07, "dispatched": 0.1, "split batches": 0.1, "two models": 0.1},
    **{"freezes": 0.12, "thaws": 0.1, "thaws a group": 0.06, "bf16 base": 0.15, "fused": 0.2},
    **{"zero first": 0.12, "zero after forward": 0.1, "zero both": 0.1},
    **{"values": 0.15, "two loaders": 0.1, "second loader first": 0.06, "feedback hook": 0.5, "power sgd": 0.7},
}
# Of each of these a draw has one at most.
ALTERNATIVES = (
    *(("thaws a group", "thaws"), ("zero first", "zero after forward", "zero both"), TWO_LOADERS),
    ("feedback hook", "power sgd"),
)
FORMATS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
# Losses and weights: absolute; norms: relative. fp32 on several ranks adds the same numbers in another order, and the
# norms of clipped steps amplify it.
LIMITS = {"no": (2e-5, 2e-3, 1e-4), "bf16": (3e-2, 0.15, 3e-2), "fp8": (0.15, 0.6, 6e-2)}
WORLD_SECONDS = 300.0


def setup_of(rng: random.Random, experts: bool = False, ranks: Sequence[int] = (1, 2, 2, 2, 4, 4)) -> Setup:
    count = rng.choice(ranks)
    schedule = rng.choice(("1f1b", *SCHEDULES))
    names = EXPERT_SETUPS[count] if experts and count > 1 else SETUPS[count]
    return Setup(rng.choice(names), count, rng.random() < 0.8, rng.choice(FORMATS), schedule)


def draw_of(seed: int, number: int) -> Draw:
    """The draw of a number, which is the same on every machine."""
    rng = random.Random(f"{seed}.{number}")
    mixture = rng.random() < 0.2
    setup = setup_of(rng, experts=mixture and rng.random() < 0.8)
    features = {name for name, chance in FEATURES.items() if rng.random() < chance}
    model = rng.choice(MIXTURES if mixture else (*MODELS[:4], *MODELS))
    if model == "batchnorm":
        features -= {"tied", "lora", "masks", "packed", "num_items", "dropout", "frozen", "checkpointing", "bf16 base"}
    for names in ALTERNATIVES:
        features -= set([name for name in names if name in features][1:])
    if "bf16 base" in features and rng.random() < 0.7:
        features |= {"lora"}
    if "values" in features and rng.random() < 0.7:
        features |= {"dispatched"}
    later = setup_of(rng, experts=mixture and rng.random() < 0.8) if rng.random() < 0.15 else None
    hooks = features & {"feedback hook", "power sgd"}
    if setup.name not in ("ddp", "dp_replicate2"):  # the others do without DDP
        features -= hooks
    elif hooks and later is not None:
        later = setup  # on other ranks it begins anew
    if setup.sizes.keys() & {"cp", "sp"}:
        features -= {"num_items"}  # the items of a batch are on several ranks: the loss is their mean already
        features -= {"dropout"}  # other positions, other random numbers
    if "pp" in setup.sizes:
        features -= {"dropout", "num_items"}
    if features & {"dropout", "two models"} and features & {"checkpointing", "fsdp checkpointing", "local sgd"}:
        features -= {"dropout", "local sgd"}
    if setup.name not in ("single", "ddp", "fsdp2"):
        features -= {"local sgd"} if rng.random() < 0.8 else set()
    if features & {"num_items", "two models", "freezes", "thaws", "thaws a group"}:
        features -= {"local sgd"}
    if features & {"values", "bf16 base", *TWO_LOADERS, *hooks}:
        features -= {"local sgd"}
    if later is not None:
        features -= {"dropout", "dispatched", "split batches", "local sgd", "packed", "num_items", *TWO_LOADERS}
        features -= {"thaws a group"}  # a script that resumes prepares all groups
    if features & {"dispatched", "split batches"} >= {"dispatched", "split batches"}:
        features -= {"dispatched"}
    precision = rng.choice(("no", "no", "no", "no", "no", "no", "bf16", "bf16", "fp8"))
    if precision == "fp8":
        # Their reference is plain PyTorch, which has no fp8.
        features -= {"local sgd", "feedback hook", "power sgd", "values", "bf16 base"}
        if model == "batchnorm" and setup.ranks > 1:
            precision = "bf16"  # one process of the Accelerator has the statistics of the whole batch
    return Draw(
        number,
        setup,
        model,
        window=rng.choice((1, 1, 2, 3)),
        clip=rng.choice(("norm", "norm", "value", "none")),
        precision="no" if later is not None else precision,
        features=tuple(sorted(features)),
        resumes_under=later,
    )


def reference_of(draw: Draw) -> Found:
    if draw.precision != "fp8":
        return plain(draw)
    with context.isolated():  # there is no plain fp8: one process of the Accelerator
        alone = replace(draw, features=tuple(set(draw.features) - {"dispatched", "split batches", "compiled"}))
        return train(alone, Setup("single", 1), 0, draw.steps, None)


def run_jobs(draws: Sequence[Draw], ranks: int, folder: Path, second: bool) -> dict[int, list[Found]]:
    """Train the first, or the second half of draws in one world; by number, what each rank found."""
    jobs = []
    for draw in draws:
        setup, half = draw.resumes_under if second else draw.setup, draw.steps // 2
        state = str(folder / str(draw.number)) if draw.resumes_under else None
        jobs.append((draw, setup, half if second else 0, half if state and not second else draw.steps, state))
    try:
        found = run_world(run_draws, ranks, jobs, timeout=WORLD_SECONDS)
    except WorldError as error:
        if len(draws) == 1:
            return {draws[0].number: [Found(error=str(error))]}
        found = [[]]
    done = min(len(results) for results in found)
    by_number = {draw.number: [results[index] for results in found] for index, draw in enumerate(draws[:done])}
    if done and len(draws) > 1 and any(result.error for result in by_number[draws[done - 1].number]):
        done -= 1  # again, alone: the draws before it may have left something behind
    for draw in draws[done:]:
        by_number.update(run_jobs([draw], ranks, folder, second))
    return by_number


def verdict(draw: Draw, halves: list[list[Found]], reference: Found | str) -> dict[str, Any]:
    """Whether a draw is equal, refused, or neither, and the largest deviations."""
    record: dict[str, Any] = {"draw": asdict(draw), "text": str(draw)}
    ranks = [found for half in halves for found in half]
    errors = [found.error for found in ranks if found.error]
    refusals = [found.refused for found in ranks if found.refused]
    if errors or (refusals and any(len({bool(found.refused) for found in half}) > 1 for half in halves)):
        text = errors[0] if errors else f"refused on {len(refusals)} ranks only: {refusals[0]}"
        return {**record, "kind": "error", "detail": text[-3000:]}
    if refusals:
        return {**record, "kind": "refused", "detail": refusals[0]}
    if isinstance(reference, str):
        return {**record, "kind": "error", "detail": f"one process: {reference}"}
    losses = [value for half in halves for value in half[0].losses]
    norms = [value for half in halves for value in half[0].norms]
    record["loss"] = largest(losses, reference.losses)
    compares_norms = not any(setup.name.startswith("zero") for setup in (draw.setup, draw.resumes_under) if setup)
    record["norm"] = largest(norms, reference.norms, relative=True) if compares_norms else 0.0
    record["weights"] = weights_apart(halves[-1][0].weights, reference.weights)
    limits = LIMITS["bf16" if draw.has("bf16 base") else draw.precision]
    equal = all(record[name] <= limit for name, limit in zip(("loss", "norm", "weights"), limits, strict=True))
    if not equal:
        record["worst"] = worst_weight(halves[-1][0].weights, reference.weights)
        record["detail"] = f"losses {losses} instead of {reference.losses}; norms {norms} instead of {reference.norms}"
    return {**record, "kind": "equal" if equal else "different"}


def largest(found: list[float], expected: list[float], relative: bool = False) -> float:
    if len(found) != len(expected):
        return float("inf")
    pairs = zip(found, expected, strict=True)
    apart = [abs(one - other) / (max(abs(other), 1e-6) if relative else 1) for one, other in pairs]
    return max((value if value == value else float("inf") for value in apart), default=0.0)


def without_scales(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights without the buffers of fp8 layers, which follow the data of a rank."""
    return {name: value for name, value in weights.items() if ".fp8_" not in name}


def weights_apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    found, expected = without_scales(found), without_scales(expected)
    if set(found) != set(expected):
        return float("inf")
    apart = [(found[name].float() - value.float()).abs().max().item() for name, value in expected.items()]
    return max(apart, default=0.0)


def worst_weight(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    found, expected = without_scales(found), without_scales(expected)
    if set(found) != set(expected):
        return f"other names: {sorted(set(found) ^ set(expected))[:6]}"
    return max(expected, key=lambda name: (found[name].float() - expected[name].float()).abs().max().item())


def run_all(draws: Sequence[Draw], batch: int) -> Iterable[dict[str, Any]]:
    by_ranks: dict[int, list[Draw]] = defaultdict(list)
    for draw in draws:
        by_ranks[draw.setup.ranks].append(draw)
    for ranks, chosen in sorted(by_ranks.items()):
        for start in range(0, len(chosen), batch):
            yield from run_batch(chosen[start : start + batch], ranks)


def run_batch(draws: Sequence[Draw], ranks: int) -> Iterable[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="combinations"))
    try:
        begun = time.monotonic()
        first = run_jobs(draws, ranks, folder, second=False)
        for draw in draws:
            halves = [first[draw.number]]
            if draw.resumes_under and not any(found.refused or found.error for found in halves[0]):
                halves.append(run_jobs([draw], draw.resumes_under.ranks, folder, second=True)[draw.number])
            try:
                reference: Found | str = reference_of(draw)
            except Exception as error:
                reference = f"{type(error).__name__}: {error}"
            seconds = (time.monotonic() - begun) / len(draws)
            yield {**verdict(draw, halves, reference), "seconds": round(seconds, 2)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def computes_in_fp32(draw: dict[str, Any]) -> bool:
    return draw["precision"] == "no" and "bf16 base" not in draw["features"]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Counts by kind and strategy, with the largest deviations in fp32 of those that are equal."""
    rows = ["| strategy | draws | equal | refused | neither | loss | norm | weights |", "|---|" + "---|" * 7]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[re.sub(r"(?<!fsdp)(?<!zero)\d", "", record["draw"]["setup"]["name"])].append(record)
    for name, group in [*sorted(groups.items()), ("**all**", list(records))]:
        kinds = Counter(record["kind"] for record in group)
        equal = [record for record in group if record["kind"] == "equal" and computes_in_fp32(record["draw"])]
        deviations = [f"{max((item[key] for item in equal), default=0):.0e}" for key in ("loss", "norm", "weights")]
        neither = kinds["different"] + kinds["error"]
        counts = [len(group), kinds["equal"], kinds["refused"], neither]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(deviations)} |")
    return "\n".join(rows)


def preload_all() -> None:
    names = [f"accel.strategies.{name}" for name in ("ddp", "fsdp1", "fsdp2", "mesh", "mesh_pp", "deepspeed")]
    models = [f"transformers.models.{name}.modeling_{name}" for name in BLOCKS]
    preload("accel.accelerator", *names, *models, "accel.fsdp.checkpoint.files", "peft", "torch._dynamo", "accel_fp8")
    preload("torch.distributed.pipelining", "torch.distributed.checkpoint.state_dict", "_combination_preload")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="how many combinations")
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", type=int, default=35, help="from which the draws follow")
    parser.add_argument("--number", type=int, nargs="+", help="run these draws only, and print all that they found")
    parser.add_argument("--only", help="draws whose text contains this")
    parser.add_argument("--batch", type=int, default=8, help="how many draws a world trains one after another")
    parser.add_argument("--results", type=Path, help="append each draw to this file of JSON lines")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for line in given.table.read_text().splitlines()]))
        return 0
    torch.set_num_threads(1)
    preload_all()
    numbers = given.number or range(given.first, given.first + given.draws)
    draws = [draw_of(given.seed, number) for number in numbers]
    draws = [draw for draw in draws if not given.only or given.only in str(draw)]
    print(f"seed {given.seed}, {len(draws)} draws", flush=True)
    records = []
    for record in run_all(draws, given.batch):
        records.append(record)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if record["kind"] in ("different", "error") or given.number:
            print(json.dumps({key: value for key, value in record.items() if key != "draw"}, indent=1), flush=True)
    print(table(records))
    return int(any(record["kind"] in ("different", "error") for record in records))


if __name__ == "__main__":
    sys.exit(main())
