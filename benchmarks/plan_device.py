"""The memory and the time of a step that accel plan predicts for a GPU, next to steps on one.

    python benchmarks/plan_device.py measure FILE               # on a machine with the GPU: what steps need and take
    python benchmarks/plan_device.py compare FILE PROFILE...    # anywhere: the plans, with these hardware profiles

A profile is a name of accel plan, such as h100-sxm, or a JSON file for its --hardware. Nothing is fitted to the rows.
Memory is the largest sum of torch's allocator in one step (``max_memory_allocated``); time is the median of five steps.

Exits with 1 if the error of the memory of a row is above 5%, or the median error of the times above 15%.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accel_state.testing import run_world

MEMORY_LIMIT, TIME_LIMIT = 0.05, 0.15
_STEPS = 5
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
_NARROW = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
_WORDS = {"num_hidden_layers": 4, "vocab_size": 128000}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1408,
}
_BF16 = {"mixed_precision": "bf16"}
_FSDP = {**_BF16, "use_fsdp": "true", "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
_FULL = {**_FSDP, "fsdp_activation_checkpointing": "true"}
_SELECTIVE = {**_FULL, "fsdp_activation_checkpointing_mode": "selective"}

# By name: options of accel launch, what is another in the model, batch size, tokens of a sample, and AdamW's
# implementation.
CASES: dict[str, tuple[dict[str, str], dict[str, Any], int, int, str]] = {
    "bf16": (_BF16, {}, 4, 2048, "foreach"),
    "bf16, fused optimizer": (_BF16, {}, 4, 2048, "fused"),
    "bf16, 4 micro batches": ({**_BF16, "gradient_accumulation_steps": "4"}, {}, 1, 4096, "foreach"),
    "bf16, 128,000 words": (_BF16, _WORDS, 4, 2048, "foreach"),
    "bf16, deep and narrow": (_BF16, _NARROW, 8, 1024, "foreach"),
    "bf16, experts": (_BF16, _EXPERTS, 4, 2048, "foreach"),
    "float32": ({}, {}, 1, 2048, "foreach"),
    "bf16, compiled": ({**_BF16, "dynamo_backend": "inductor"}, {}, 4, 2048, "foreach"),
    "fsdp2": (_FSDP, {}, 2, 2048, "foreach"),
    "fsdp2, selective checkpointing": (_SELECTIVE, {}, 2, 2048, "foreach"),
    "fsdp2, checkpointing, 16,384 tokens": (_FULL, {}, 1, 16384, "foreach"),
}


def _ranks(name: str) -> int:
    """Ranks that share the GPU, if it is the only one: their time says nothing then."""
    return 2 if name.startswith("fsdp2") else 1


def measured(folder: str, options: dict[str, str], batch: int, length: int, implementation: str) -> tuple[int, float]:
    """The peak of memory of a step in bytes, and seconds of one."""
    import torch

    from accel import Accelerator
    from accel_launch.config.read import load_settings
    from accel_plan.models import build_model, model_config
    from accel_plan.step import build_optimizer

    os.environ.update(load_settings(options, environ={"HF_HOME": "nowhere"}).environment())
    accelerator = Accelerator()
    torch.manual_seed(0)
    model: Any = build_model(model_config(folder))
    model.to_empty(device=accelerator.device)
    model.init_weights()
    model, optimizer = accelerator.prepare(model, build_optimizer("adamw", implementation, model.parameters()))
    gc.collect()
    vocabulary = 1000

    def step() -> None:
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                tokens = torch.randint(vocabulary, (batch, length), device=accelerator.device)
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                del loss, tokens
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()

    step()
    step()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return torch.cuda.max_memory_allocated(), statistics.median(taken)


def _write_model(folder: str, changed: dict[str, Any]) -> None:
    Path(folder, "config.json").write_text(json.dumps({**_LLAMA, **changed}))


def _options(name: str) -> dict[str, str]:
    return {**CASES[name][0], "num_processes": str(_ranks(name))}


def _dtype(options: dict[str, str]) -> str:
    return options.get("mixed_precision", "fp32")


def measure(file: str) -> int:
    """Run all cases, and write what was found after each."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, changed, batch, length, implementation) in CASES.items():
            _write_model(folder, changed)
            arguments = (folder, _options(name), batch, length, implementation)
            found[name] = run_world(
                measured, _ranks(name), *arguments, env={"ACCELERATE_USE_CPU": None}, state=False, timeout=120
            )[0]
            print(f"{name:<40}{found[name][0] / 2**30:>8.2f} GiB{found[name][1]:>9.4f} s", flush=True)
            Path(file).write_text(json.dumps(found))
    return 0


def compare(file: str, profiles: list[str]) -> int:
    """Plan all cases, and print both."""
    from accel_launch.config.read import load_settings
    from accel_plan.plan import PlanRequest, make_plan
    from accel_plan.timing import Speeds, step_time
    from accel_state.hardware import profile, read_profile

    found, status = json.loads(Path(file).read_text()), 0
    hardware = {name: read_profile(name) if name.endswith(".json") else profile(name) for name in profiles}
    errors: dict[str, list[float]] = {name: [] for name in profiles}
    columns = "".join(f"{f'{name}, s':>20}{'error':>8}" for name in profiles)
    print(f"{'configuration':<38}{'planned':>9}{'measured':>9} GiB{'error':>8}{'seconds':>9}{columns}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (options, changed, batch, length, implementation) in CASES.items():
            if name not in found:
                continue
            _write_model(folder, changed)
            settings = load_settings(_options(name), environ={"HF_HOME": "nowhere"})
            request = {"optimizer": "adamw", "implementation": implementation}
            plan = make_plan(
                PlanRequest(
                    settings,
                    folder,
                    batch_size=batch,
                    seq_length=length,
                    hardware=hardware[profiles[0]] if _ranks(name) == 1 else None,
                    **request,
                )
            )
            assert plan.peak is not None
            memory, seconds = found[name]
            error = plan.peak.total / memory - 1
            status |= abs(error) > MEMORY_LIMIT
            row = f"{name:<38}{plan.peak.total / 2**30:>9.2f}{memory / 2**30:>9.2f}    {error:>+8.1%}"
            if _ranks(name) > 1:
                print(row, flush=True)
                continue
            row += f"{seconds:>9.4f}"
            for label, device in hardware.items():
                speeds = Speeds(device, "dynamo_backend" in options)
                time = step_time(plan.operations, speeds, batch * length, 1, _dtype(options)).seconds
                errors[label].append(time / seconds - 1)
                row += f"{time:>20.4f}{errors[label][-1]:>+8.1%}"
            print(row, flush=True)
    for label, values in errors.items():
        median = statistics.median(map(abs, values))
        print(f"{label}: median error of the times {median:.1%}, allowed {TIME_LIMIT:.0%}")
        status |= median > TIME_LIMIT
    return int(status)


if __name__ == "__main__":
    _, verb, file, *profiles = sys.argv
    raise SystemExit(measure(file) if verb == "measure" else compare(file, profiles))
