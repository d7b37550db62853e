"""The time that accel plan predicts, next to torchtitan's six rows of Llama 3.1 8B on 8 and 128 H100.

    python benchmarks/plan_time.py

It takes two traces of a few minutes on a busy core. The shares in accel_plan/timing.py were fitted to these rows, so
this shows how well six numbers follow from four, no more. Checkpointing is selective, by operation, as in
_selective.py.

Exits with 1 if a row is off by more than 15%.
"""

from __future__ import annotations

from typing import Any

from _selective import checkpoint_by_operation

LIMIT = 0.15
# Ranks, compiled, fp8: tokens per second and device. Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md.
ROWS = {
    (8, False, False): 5762,
    (8, True, False): 6667,
    (8, True, True): 8532,
    (128, False, False): 5605,
    (128, True, False): 6514,
    (128, True, True): 8380,
}


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
    print(f"{'H100':>6}{'':>11}{'planned':>10}{'published':>10}{'error':>8}   tokens per second; parts in seconds")
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
    raise SystemExit(rows())
