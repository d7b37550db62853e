"""DeepSpeed itself takes the configurations of the plugin."""

from __future__ import annotations

import importlib.util
import os
import random
from typing import Any

import pytest
import torch

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install 'accel[deepspeed]'", allow_module_level=True)

# A process that imports DeepSpeed: seconds on free cores, many on busy ones.
pytestmark = pytest.mark.timeout(300)


def read_by_deepspeed(count: int) -> int:
    """Resolve random settings, and have DeepSpeed parse those that are not refused."""
    from accel import DeepSpeedPlugin
    from accel.deepspeed.config import PreparedFacts

    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.config import DeepSpeedConfig

    draw, read = random.Random(3), 0
    model = torch.nn.Linear(2, 2)
    for _ in range(count):
        zero = {
            "stage": draw.randrange(4),
            "stage3_max_live_parameters": "auto",
            "reduce_bucket_size": draw.choice(["auto", 500]),
        }
        config: dict[str, Any] = {
            "zero_optimization": zero,
            "bf16": {"enabled": draw.choice(["auto", True])},
            "fp16": {"loss_scale": "auto"},
        }
        config.update(
            {
                key: draw.choice(["auto", 4])
                for key in draw.sample(["train_batch_size", "gradient_accumulation_steps"], 1)
            }
        )
        devices = {
            f"offload_{kind}_device": draw.choice([None, "none", "cpu", "nvme"]) for kind in ("param", "optimizer")
        }
        model.config = {"hidden_size": 16}  # type: ignore[assignment]
        facts = PreparedFacts(
            world_size=1,  # of a process without a group
            micro_batch_sizes=(2,),
            gradient_accumulation_steps=draw.choice([1, 2]),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        try:
            plugin = DeepSpeedPlugin(
                hf_ds_config=config, offload_param_nvme_path="/drive", offload_optimizer_nvme_path="/drive", **devices
            )
            done = plugin.resolve(facts)
        except ConfigurationError:
            continue
        found = DeepSpeedConfig(done)
        sizes = (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)
        assert sizes == tuple(
            done[f"{key}"]
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        assert found.zero_optimization_stage == plugin.zero_stage and found.bfloat16_config.enabled is (
            plugin.precision == "bf16"
        )
        assert found.zero_config.reduce_bucket_size in (256, 500)
        assert (found.zero_config.max_live_parameters, found.gradient_clipping) == (1_000_000_000, 0.0)
        read += 1
    return read


def resolved_by_an_accelerator() -> list[Any]:
    from accel import Accelerator, DeepSpeedPlugin
    from accel.utils.deepspeed import get_active_deepspeed_plugin

    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 10}
    )
    with patch_environment(ACCELERATE_MIXED_PRECISION="no"):  # the launcher's default
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, deepspeed_plugin=plugin)
    assert (
        get_active_deepspeed_plugin(accelerator.state)
        is plugin
        is accelerator.deepspeed_plugin
        is accelerator.state.deepspeed_plugin
    )
    settled = [accelerator.gradient_accumulation_steps, accelerator.mixed_precision, accelerator.state.mixed_precision]
    accelerator.end_training()
    return [*settled, str(accelerator.distributed_type), plugin.selected]


def in_one_world() -> tuple[int, list[Any]]:
    return read_by_deepspeed(200), resolved_by_an_accelerator()


def test_the_accelerator_follows_the_configuration() -> None:
    """And DeepSpeed reads it."""
    ((read, followed),) = run_world(in_one_world, 1, state=False, timeout=280)
    assert read > 40 and followed == [10, "bf16", "bf16", "DEEPSPEED", True]
