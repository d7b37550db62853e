"""DeepSpeed settings that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .declaration import MORE_THAN_ONE, OptionGroup, option

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mpich", "mvapich", "impi", "slurm", "nossh")
_HOSTFILE_USED = {"deepspeed_multinode_launcher": tuple(name for name in LAUNCHERS if name != "standard")}

# Where a DeepSpeed configuration file holds the same setting.
FILE_PATHS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_NO_FILE: dict[str, tuple[Any, ...]] = {"deepspeed_config_file": (None,)}

# Read by the launcher, not by the processes.
_launcher = functools.partial(option, section="deepspeed_config", env_prefix="ACCELERATE_DEEPSPEED_", alone=False)
_deepspeed = functools.partial(_launcher, exported=True)


@dataclass(frozen=True)
class DeepSpeedOptions(OptionGroup):
    """DeepSpeed. A value of None means "not set": a DeepSpeed configuration file may set it instead."""

    title = "DeepSpeed"
    description = (
        "Used with --use_deepspeed. A setting that --deepspeed_config_file gives a value must not be set here as well."
    )
    enabled_by = ("use_deepspeed", True)

    config_file: str | None = _deepspeed(
        name="deepspeed_config_file",
        metavar="FILE",
        help='DeepSpeed configuration (JSON). Its "auto" values are filled in from the options here.',
        question="Path of a DeepSpeed configuration file in JSON (leave it empty to answer questions instead)?",
    )
    zero_stage: int | None = _deepspeed(
        choices=("0", "1", "2", "3"),
        help="What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. Left out: 2.",
        question="Which ZeRO stage should be used?",
        asked_when=_NO_FILE,
        suggested=2,
    )
    offload_optimizer_device: str | None = _deepspeed(
        choices=OFFLOAD_DEVICES,
        help="Device that optimizer states are offloaded to; ZeRO stage 1 or higher.",
        question="Where should optimizer states be offloaded to?",
        asked_when={**_NO_FILE, "zero_stage": (2, 3)},
        suggested="none",
    )
    offload_param_device: str | None = _deepspeed(
        choices=OFFLOAD_DEVICES,
        help="Device that parameters are offloaded to; ZeRO stage 3 only.",
        question="Where should parameters be offloaded to?",
        asked_when={**_NO_FILE, "zero_stage": (3,)},
        suggested="none",
    )
    offload_optimizer_nvme_path: str | None = _deepspeed(
        metavar="DIR",
        help="Directory on an NVMe drive for optimizer states.",
        question="Which directory on an NVMe drive should hold the optimizer states?",
        asked_when={"offload_optimizer_device": ("nvme",)},
    )
    offload_param_nvme_path: str | None = _deepspeed(
        metavar="DIR",
        help="Directory on an NVMe drive for parameters.",
        question="Which directory on an NVMe drive should hold the parameters?",
        asked_when={"offload_param_device": ("nvme",)},
    )
    gradient_clipping: float | None = _deepspeed(
        minimum=0,
        env="ACCELERATE_GRADIENT_CLIPPING",
        metavar="NORM",
        help="Maximum gradient norm that DeepSpeed clips to.",
        question="To which maximum norm should gradients be clipped (leave it empty for no clipping)?",
        asked_when=_NO_FILE,
    )
    zero3_init_flag: bool | None = _deepspeed(
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        help="Create models with sharded parameters (deepspeed.zero.Init); ZeRO stage 3 only.",
        question="Should models be created with sharded parameters, by deepspeed.zero.Init (for ZeRO stage 3)?",
        suggested=False,
    )
    zero3_save_16bit_model: bool | None = _deepspeed(
        help="Gather the full 16-bit weights when a model is saved; ZeRO stage 3 only.",
        question="Should the full 16-bit weights be gathered when a model is saved?",
        asked_when={**_NO_FILE, "zero_stage": (3,)},
        suggested=False,
    )
    moe_layer_cls_names: str | None = _deepspeed(
        name="deepspeed_moe_layer_cls_names",
        metavar="NAMES",
        help="Class names of mixture-of-experts layers, separated by commas, such as MixtralSparseMoeBlock.",
        question="Class names of mixture-of-experts layers, separated by commas (leave it empty for none)?",
        asked_when={"zero_stage": (3,)},
    )
    hostfile: str | None = _launcher(
        name="deepspeed_hostfile",
        metavar="FILE",
        help="DeepSpeed hostfile, which lists machines and their slots.",
        question="Path of DeepSpeed's hostfile?",
        asked_when=_HOSTFILE_USED,
    )
    exclusion_filter: str | None = _launcher(
        name="deepspeed_exclusion_filter",
        metavar="FILTER",
        help="Machines and slots of the hostfile to leave out, such as worker-1@worker-2:0,1.",
        question="Which machines and slots should be left out (leave it empty for none)?",
        asked_when=_HOSTFILE_USED,
    )
    inclusion_filter: str | None = _launcher(
        name="deepspeed_inclusion_filter",
        metavar="FILTER",
        help="The only machines and slots of the hostfile to use, such as worker-0@worker-1:0,2.",
        question="Which machines and slots should be used (leave it empty for all)?",
        asked_when={**_HOSTFILE_USED, "deepspeed_exclusion_filter": (None,)},
    )
    multinode_launcher: str | None = _launcher(
        name="deepspeed_multinode_launcher",
        choices=LAUNCHERS,
        help="What starts the processes on several machines: standard is torch's elastic agent on each machine; all "
        "others are DeepSpeed launchers. Left out: pdsh.",
        question="Which launcher should be used on several machines?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
        suggested="pdsh",
    )
