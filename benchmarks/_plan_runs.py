"""Training steps of a configuration that accel plan has planned, on gloo ranks of this machine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from accel_plan.candidates import Candidate
from accel_state.hardware import HardwareProfile, read_profile
from accel_state.testing import preload, run_world

ENVIRON = {"HF_HOME": "nowhere"}
WARM_UP, TIMED = 1, 4
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 4000,
}
_NARROW = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 2, "num_key_value_heads": 2}
# By name: the model, tokens of a sample, and samples of a step of all ranks.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dense": (_LLAMA, 256, 4),
    "large vocabulary": ({**_LLAMA, "num_hidden_layers": 2, "vocab_size": 32000}, 128, 4),
    "long": ({**_LLAMA, **_NARROW, "num_hidden_layers": 2}, 2048, 4),
    "deep": ({**_LLAMA, **_NARROW, "num_hidden_layers": 16}, 256, 4),
    "experts": (
        {
            **_LLAMA,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
        },
        256,
        4,
    ),
}


def write_model(folder: Path, name: str) -> tuple[str, int, int]:
    """The configuration of a model of :data:`MODELS`, tokens of a sample, and samples of a step."""
    content, length, samples = MODELS[name]
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder), length, samples


def preload_all() -> None:
    """What ranks need, imported once."""
    models = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3_moe"))
    preload("accel", "accel.accelerator", "accel_plan.models", "accel_plan.step", "accel_launch.config.read", *models)
    preload("torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.distributed.fsdp")


def measured_profile(ranks: int, folder: Path) -> HardwareProfile:
    """The profile that accel doctor writes for so many ranks of this machine."""
    file = folder / f"{ranks}.json"
    words = ["doctor", "--cpu", f"--num_processes={ranks}", "--timeout=550", f"--measure={file}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accel_launch", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not file.is_file():
        raise RuntimeError(f"accel doctor --measure ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return read_profile(file)


def step_seconds(model: str, length: int, candidate: Candidate, processes: int) -> float:
    """Seconds of an optimizer step: the median of some, each until the slowest rank has finished."""
    return float(run_world(_steps, processes, model, length, candidate, timeout=280)[0])


def words_of(candidate: Candidate) -> dict[str, str]:
    """The values of a candidate as the command line has them."""
    values = candidate.values().items()
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values}


def _steps(folder: str, length: int, candidate: Candidate) -> float:
    import torch.distributed as dist

    from accel import Accelerator, ParallelismConfig
    from accel.parallel.axis_settings import PipelineParallelConfig
    from accel_launch.config.read import load_settings
    from accel_plan.models import build_model, model_config
    from accel_plan.step import build_optimizer

    torch.set_num_threads(1)
    os.environ.update(load_settings(words_of(candidate), environ=ENVIRON).environment())
    given: dict[str, Any] = {}
    if candidate.axes["pp"] > 1:
        handler = PipelineParallelConfig(candidate.schedule, num_microbatches=candidate.micro_batches)
        sizes = {f"{axis}_size": size for axis, size in candidate.axes.items()}
        given["parallelism_config"] = ParallelismConfig(**sizes, pp_handler=handler)
    accelerator = Accelerator(cpu=True, **given)
    torch.manual_seed(0)
    model: Any = build_model(model_config(folder))
    model.to_empty(device="cpu")
    model.init_weights()
    model, optimizer = accelerator.prepare(model, build_optimizer("adamw", "for_loop", model.parameters()))
    taken = []
    for _ in range(WARM_UP + TIMED):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(candidate.steps):
            with accelerator.accumulate(model):
                train(accelerator, model, optimizer, dict(candidate.axes), (candidate.batch_size, length))
        dist.barrier()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[WARM_UP:])


def train(accelerator: Any, model: Any, optimizer: Any, axes: dict[str, int], shape: tuple[int, int]) -> None:
    """One micro batch of a batch size and a length."""
    tokens = torch.randint(1000, shape, generator=torch.Generator().manual_seed(accelerator.process_index))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    inputs = next(iter(accelerator.deepspeed_ulysses_dl_adapter([inputs], model)))
    split = axes.get("cp", 1) > 1
    if split:
        inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    buffers = {"buffers": list(inputs.values()), "buffer_seq_dims": [1, 1]}
    with accelerator.maybe_context_parallel(**buffers) if split else nullcontext():
        loss = model(**inputs).loss
        accelerator.backward(loss)
    del loss, inputs, tokens
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
