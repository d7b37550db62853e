"""The time that accel plan predicts, next to torchtitan's figures and to steps on this machine.

    python benchmarks/plan_time.py            # both
    python benchmarks/plan_time.py h100       # torchtitan's six rows of Llama 3.1 8B on 8 and 128 H100
    python benchmarks/plan_time.py here       # twelve configurations on 2 and 4 ranks of this machine

The six rows take two traces of a few minutes on a busy core. The shares in accel_plan/timing.py were fitted to these
rows, so this shows how well six numbers follow from four, no more. Checkpointing is selective, by operation, as in
_selective.py.

For the twelve, accel doctor --measure writes a profile of 2 and of 4 ranks; nothing is fitted to them. Nothing else
should use the machine.

Exits with 1 if a row is off by more than 15%, if the median of the errors here is above 15%, or if the rank correlation
of planned and measured times is below 0.9.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _plan_runs import ENVIRON, measured_profile, preload_all, step_seconds, write_model
from _selective import checkpoint_by_operation

from accel_plan.candidates import AXES, FULL, NONE, SELECTIVE, Candidate

LIMIT, CORRELATION = 0.15, 0.9
_ROUNDS = 3
# Ranks, compiled, fp8: tokens a second and device. Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md.
ROWS = {
    (8, False, False): 5762,
    (8, True, False): 6667,
    (8, True, True): 8532,
    (128, False, False): 5605,
    (128, True, False): 6514,
    (128, True, True): 8380,
}


def _candidate(batch: int, steps: int = 1, checkpointing: str = NONE, micro_batches: int = 1, **axes: int) -> Candidate:
    sizes = dict.fromkeys(AXES, 1) | axes
    schedule = "1f1b" if sizes["pp"] > 1 else ""
    return Candidate(sizes, batch, steps, checkpointing, "no", micro_batches, schedule)


# Ranks, a model of _plan_runs.py, and the configuration.
HERE: tuple[tuple[int, str, Candidate], ...] = (
    (2, "dense", _candidate(2, dp_replicate=2)),
    (2, "dense", _candidate(1, 2, dp_shard=2)),
    (2, "dense", _candidate(2, 1, FULL, dp_shard=2)),
    (2, "large vocabulary", _candidate(2, dp_shard=2)),
    (2, "deep", _candidate(4, tp=2)),
    (2, "long", _candidate(4, 1, SELECTIVE, cp=2)),
    (4, "dense", _candidate(1, dp_replicate=4)),
    (4, "dense", _candidate(2, dp_shard=2, tp=2)),
    (4, "large vocabulary", _candidate(1, 1, FULL, dp_shard=4)),
    (4, "deep", _candidate(1, dp_replicate=2, dp_shard=2)),
    (4, "deep", _candidate(2, micro_batches=2, dp_replicate=2, pp=2)),
    (4, "experts", _candidate(1, dp_shard=4)),
)


def here() -> int:
    """Compare with steps on this machine."""
    from accel_launch.config.read import load_settings
    from accel_plan.plan import PlanRequest, make_plan
    from accel_plan.search import planning_request

    preload_all()
    planned: list[float] = []
    measured: list[list[float]] = [[] for _ in HERE]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = {ranks: measured_profile(ranks, folder) for ranks in (2, 4)}
        for ranks, model, candidate in HERE:
            place, length, _ = write_model(folder, model)
            settings = load_settings({"num_processes": str(ranks), "cpu": "true"}, environ=ENVIRON)
            request = PlanRequest(settings, place, seq_length=length, hardware=profiles[ranks])
            time = make_plan(planning_request(request, candidate)).time
            assert time is not None
            planned.append(time.seconds)
        for _ in range(_ROUNDS):
            for taken, (ranks, model, candidate) in zip(measured, HERE, strict=True):
                place, length, _ = write_model(folder, model)
                taken.append(step_seconds(place, length, candidate, ranks))
    found = [statistics.median(taken) for taken in measured]
    errors = [plan / real - 1 for plan, real in zip(planned, found, strict=True)]
    print("ranks  planned   measured    error   seconds of a step on this machine")
    for (ranks, model, candidate), plan, taken, real, error in zip(HERE, planned, measured, found, errors, strict=True):
        spread = f"{min(taken):.3f} to {max(taken):.3f}"
        print(f"{ranks:>5}{plan:>9.3f}{real:>11.3f}{error:>+9.1%}   {model}: {candidate.describe()} ({spread})")
    median, correlation = statistics.median(map(abs, errors)), statistics.correlation(_places(planned), _places(found))
    print(f"median error {median:.1%}, allowed {LIMIT:.0%}; rank correlation {correlation:.3f}, at least {CORRELATION}")
    return int(median > LIMIT or correlation < CORRELATION)


def _places(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def rows() -> int:
    """Compare with torchtitan's rows."""
    from accel_launch.config.read import load_settings
    from accel_plan import trace as tracing
    from accel_plan.plan import PlanRequest, make_plan
    from accel_plan.timing import Speeds, step_time
    from accel_state.hardware import profile

    build = tracing.build_model

    def build_checkpointed(*arguments: Any) -> Any:
        model = build(*arguments)
        checkpoint_by_operation(model.model.layers)
        return model

    tracing.build_model = build_checkpointed
    hardware, batch, length, worst = profile("h100-96gb"), 2, 8192, 0.0
    options = {"use_fsdp": "true", "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    print(f"{'H100':>6}{'':>11}{'planned':>10}{'published':>10}{'error':>8}   tokens a second; parts in seconds")
    for ranks in (8, 128):
        settings = load_settings({**options, "mixed_precision": "bf16", "num_processes": str(ranks)}, environ={})
        request = PlanRequest(settings, "llama-3-8b", batch_size=batch, seq_length=length, hardware=hardware)
        plan = make_plan(request)
        for (number, compiled, fp8), published in ROWS.items():
            if number != ranks:
                continue
            speeds = Speeds(hardware, compiled, fp8)
            found = step_time(plan.operations, speeds, batch * length * ranks, ranks, "bf16")
            error = found.tokens / published - 1
            worst = max(worst, abs(error))
            name = " ".join(["compiled" if compiled else "eager", *(["fp8"] if fp8 else [])])
            parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in found.parts.items())
            print(f"{ranks:>6} {name:<13}{found.tokens:>7.0f}{published:>10}{error:>+8.1%}   {parts}", flush=True)
        print(f"       peak {plan.total / 2**30:.1f} GiB of tensors", flush=True)
    print(f"largest error {worst:.1%}, allowed {LIMIT:.0%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    words = sys.argv[1:] or ["h100", "here"]
    parts = {"h100": rows, "here": here}
    if set(words) - set(parts):
        raise SystemExit(f"{' '.join(words)}: there are {' and '.join(parts)}")
    raise SystemExit(max(parts[word]() for word in words))
