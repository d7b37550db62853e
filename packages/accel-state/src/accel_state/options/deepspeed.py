"""DeepSpeed, as the launcher hands it to the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .option import MORE_THAN_ONE, OptionGroup, in_section

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mpich", "mvapich", "impi", "slurm", "nossh")
_REMOTE = {"deepspeed_multinode_launcher": tuple(name for name in LAUNCHERS if name != "standard")}

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
_deepspeed = in_section("deepspeed_config", "")
# Read by the launcher, and not by the processes.
_launcher = in_section("deepspeed_config", "", exported=False)
_OWN: dict[str, tuple[Any, ...]] = {"deepspeed_config_file": (None,)}


@dataclass(frozen=True)
class DeepSpeedOptions(OptionGroup):
    """DeepSpeed. Every value is None where nobody set it: a DeepSpeed configuration file may have it instead."""

    title: ClassVar[str] = "DeepSpeed"
    description: ClassVar[str] = (
        "Used with --use_deepspeed. What --deepspeed_config_file sets to a value must not be set here as well."
    )
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_deepspeed", True)

    config_file: str | None = _deepspeed(
        None,
        "deepspeed_config_file",
        kind=str,
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        metavar="FILE",
        help='DeepSpeed configuration (JSON). What it has as "auto" is filled in from the options here.',
        question="Path of a DeepSpeed configuration file in JSON (leave it empty to answer questions instead)?",
    )
    zero_stage: int | None = _deepspeed(
        None,
        "zero_stage",
        kind=int,
        choices=("0", "1", "2", "3"),
        env="ACCELERATE_DEEPSPEED_ZERO_STAGE",
        help="What is sharded over the processes: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too. "
        "DeepSpeed's plugin "
        "takes 2 where nobody sets it.",
        question="Which ZeRO stage should be used?",
        asked_when=_OWN,
        suggested=2,
    )
    offload_optimizer_device: str | None = _deepspeed(
        None,
        "offload_optimizer_device",
        kind=str,
        choices=OFFLOAD_DEVICES,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        help="Where optimizer states are kept; from stage 1 on.",
        question="Where should optimizer states be offloaded to?",
        asked_when={**_OWN, "zero_stage": (2, 3)},
        suggested="none",
    )
    offload_param_device: str | None = _deepspeed(
        None,
        "offload_param_device",
        kind=str,
        choices=OFFLOAD_DEVICES,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        help="Where parameters are kept; stage 3 only.",
        question="Where should parameters be offloaded to?",
        asked_when={**_OWN, "zero_stage": (3,)},
        suggested="none",
    )
    offload_optimizer_nvme_path: str | None = _deepspeed(
        None,
        "offload_optimizer_nvme_path",
        kind=str,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        metavar="FOLDER",
        help="Folder on an NVMe drive for optimizer states.",
        question="Which folder on an NVMe drive should hold the optimizer states?",
        asked_when={"offload_optimizer_device": ("nvme",)},
    )
    offload_param_nvme_path: str | None = _deepspeed(
        None,
        "offload_param_nvme_path",
        kind=str,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        metavar="FOLDER",
        help="Folder on an NVMe drive for parameters.",
        question="Which folder on an NVMe drive should hold the parameters?",
        asked_when={"offload_param_device": ("nvme",)},
    )
    gradient_clipping: float | None = _deepspeed(
        None,
        "gradient_clipping",
        kind=float,
        minimum=0,
        env="ACCELERATE_GRADIENT_CLIPPING",
        metavar="NORM",
        help="Norm that gradients are clipped to by DeepSpeed.",
        question="To which norm should gradients be clipped (leave it empty for none)?",
        asked_when=_OWN,
    )
    zero3_init_flag: bool | None = _deepspeed(
        None,
        "zero3_init_flag",
        kind=bool,
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        help="Create parameters sharded from the start (deepspeed.zero.Init); stage 3 only.",
        question="Should models be created sharded, with deepspeed.zero.Init (for ZeRO stage 3)?",
        suggested=False,
    )
    zero3_save_16bit_model: bool | None = _deepspeed(
        None,
        "zero3_save_16bit_model",
        kind=bool,
        env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        help="Gather 16-bit weights when a model is saved; stage 3 only.",
        question="Should whole 16-bit weights be saved?",
        asked_when={**_OWN, "zero_stage": (3,)},
        suggested=False,
    )
    moe_layer_cls_names: str | None = _deepspeed(
        None,
        "deepspeed_moe_layer_cls_names",
        kind=str,
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        metavar="NAMES",
        help="Class names of mixture-of-experts layers, separated by commas, such as MixtralSparseMoeBlock.",
        question="Class names of mixture-of-experts layers, separated by commas (leave it empty for none)?",
        asked_when={"zero_stage": (3,)},
    )
    hostfile: str | None = _launcher(
        None,
        "deepspeed_hostfile",
        kind=str,
        env="ACCELERATE_DEEPSPEED_HOSTFILE",
        metavar="FILE",
        help="DeepSpeed's list of machines and their slots.",
        question="Path of DeepSpeed's hostfile?",
        asked_when=_REMOTE,
    )
    exclusion_filter: str | None = _launcher(
        None,
        "deepspeed_exclusion_filter",
        kind=str,
        env="ACCELERATE_DEEPSPEED_EXCLUSION_FILTER",
        metavar="FILTER",
        help="Machines and slots of the hostfile to leave out, such as worker-1@worker-2:0,1.",
        question="Which machines and slots should be left out (leave it empty for none)?",
        asked_when=_REMOTE,
    )
    inclusion_filter: str | None = _launcher(
        None,
        "deepspeed_inclusion_filter",
        kind=str,
        env="ACCELERATE_DEEPSPEED_INCLUSION_FILTER",
        metavar="FILTER",
        help="The only machines and slots of the hostfile to use, such as worker-0@worker-1:0,2.",
        question="Which machines and slots should be used (leave it empty for all)?",
        asked_when={**_REMOTE, "deepspeed_exclusion_filter": (None,)},
    )
    multinode_launcher: str | None = _launcher(
        None,
        "deepspeed_multinode_launcher",
        kind=str,
        choices=LAUNCHERS,
        env="ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER",
        help="What starts the processes on several machines: standard is torch's agent on each machine; the others "
        "are DeepSpeed's. "
        "Left out: pdsh.",
        question="Which launcher should be used on several machines?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
        suggested="pdsh",
    )
