"""The time that accel plan predicts, next to what others published and to steps on this machine.

    python benchmarks/plan_time.py rows                 # torchtitan's six rows of Llama 3.1 8B on 8 and 128 H100
    python benchmarks/plan_time.py machine [WORD...]    # configurations of 2 and 4 gloo ranks on this machine

`rows`: two traces of a few minutes on a busy core. The shares in accel_plan/timing.py were fitted to these rows, so
this shows how well six numbers follow from four, no more. Checkpointing is selective, by operation, as in
_selective.py.

`machine`: measures a profile with `accel doctor --measure` for 2 and for 4 processes, then each configuration. Nothing
else should run. Results are kept in plan_time.json in the current directory, and what is there is not measured again:
delete the file to start anew.

Exits with 1 if a row is off by more than 15%, or the configurations by more than 15% in the median or with a rank
correlation below 0.9.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _selective import checkpoint_by_operation
from plan_memory import BATCH, CASES, LENGTH, SHAPE, train

from accel_state.testing import run_world

LIMIT, CORRELATION = 0.15, 0.9
# Ranks, compiled, fp8: tokens a second and device. Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md.
ROWS = {
    (8, False, False): 5762,
    (8, True, False): 6667,
    (8, True, True): 8532,
    (128, False, False): 5605,
    (128, True, False): 6514,
    (128, True, True): 8380,
}
MACHINE = (
    *("ddp", "ddp, 64,000 words, 3 micro batches", "fsdp1", "fsdp2", "fsdp2, checkpointing", "fsdp2, 3 micro batches"),
    *("hsdp", "tp", "tp x fsdp2, 64,000 words", "sp", "pp", "pp x tp"),
)
RESULTS = Path("plan_time.json")
_STEPS = 7


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


def measure(folder: str, optimizer: str, implementation: str, options: dict[str, str], axes: dict[str, int]) -> float:
    """The median time of a step on this rank, in seconds."""
    import os

    from accel import Accelerator
    from accel_launch.config.read import load_settings
    from accel_plan.models import build_model, model_config
    from accel_plan.step import build_optimizer

    torch.set_num_threads(1)
    os.environ.update(load_settings(options, environ={"HF_HOME": "nowhere"}).environment())
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = build_model(model_config(folder))
    model.to_empty(device="cpu")
    model.init_weights()
    model, prepared = accelerator.prepare(model, build_optimizer(optimizer, implementation, model.parameters()))
    times = []
    for _ in range(_STEPS):
        accelerator.wait_for_everyone()
        begin = time.perf_counter()
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                train(accelerator, model, prepared, axes)
        times.append(time.perf_counter() - begin)
    accelerator.wait_for_everyone()
    return statistics.median(times[2:])


def profile_of_machine(processes: int) -> Path:
    """The measured profile for this many processes."""
    file = Path(f"plan_time_profile_{processes}.json").absolute()
    if not file.is_file():
        words = ["doctor", "--cpu", "--num_processes", str(processes), "--timeout", "300", "--measure", str(file)]
        subprocess.run([sys.executable, "-m", "accel_launch", *words], check=True)
    return file


def compare(folder: Path, name: str) -> tuple[float, float]:
    """Planned and measured seconds of a step."""
    from accel_launch.config.read import load_settings
    from accel_plan.plan import PlanRequest, make_plan
    from accel_state.hardware import read_profile

    ranks, options, changed, optimizer, implementation = CASES[name]
    (folder / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 1000, **changed}))
    settings = load_settings({**options, "num_processes": str(ranks)}, environ={"HF_HOME": "nowhere"})
    request = PlanRequest(settings, str(folder), batch_size=BATCH, seq_length=LENGTH, optimizer=optimizer)
    hardware = read_profile(profile_of_machine(ranks))
    plan = make_plan(replace(request, implementation=implementation, hardware=hardware))
    assert plan.time is not None
    axes = {axis: size for axis, (_, size) in plan.coordinates.items()}
    found = run_world(measure, ranks, str(folder), optimizer, implementation, options, axes, timeout=500)
    return plan.time.seconds, statistics.mean(found)


def machine(words: list[str]) -> int:
    """Compare with this machine."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MACHINE:
            if name not in results and (not words or any(word in name for word in words)):
                results[name] = compare(Path(folder), name)
                RESULTS.write_text(json.dumps(results, indent=2))
    print(f"{'configuration':<44}{'ranks':>6}{'planned':>10}{'measured':>10}{'error':>8}   seconds a step")
    for name, (planned, measured) in results.items():
        error = f"{planned / measured - 1:>+8.1%}"
        print(f"{name:<44}{CASES[name][0]:>6}{planned:>10.3f}{measured:>10.3f}{error}")
    pairs = list(results.values())
    if len(pairs) < 3:
        return 0
    median = statistics.median(abs(planned / measured - 1) for planned, measured in pairs)
    correlation = statistics.correlation(*map(_ranks, zip(*pairs, strict=True)))
    print(f"median error {median:.1%}, allowed {LIMIT:.0%}; rank correlation {correlation:.2f}, at least {CORRELATION}")
    return int(median > LIMIT or correlation < CORRELATION)


def _ranks(values: tuple[float, ...]) -> list[float]:
    ordered = sorted(values)
    return [float(ordered.index(value)) for value in values]


def main() -> int:
    """Run what the first argument names."""
    words = sys.argv[1:]
    if words[:1] == ["rows"]:
        return rows()
    if words[:1] == ["machine"]:
        return machine(words[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
