"""DeepSpeed settings of the launcher, and the check against a DeepSpeed configuration file."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigurationError
from .config_file import expand
from .declaration import MORE_THAN_ONE, OptionGroup, look_up, option
from .resolution import Resolution

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
# Those that read a hostfile.
_DEEPSPEED_LAUNCHERS = ("pdsh", "openmpi", "mpich", "mvapich", "impi", "slurm", "nossh")
LAUNCHERS = ("pdsh", "standard", *_DEEPSPEED_LAUNCHERS[1:])
_HOSTFILE_USED = {"deepspeed_multinode_launcher": _DEEPSPEED_LAUNCHERS}

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
    enabled_by: ClassVar[tuple[str, Any] | None] = ("use_deepspeed", True)

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
        separated=True,
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
        help="What starts the processes on several machines: standard is accel launch on each machine; all "
        "others are DeepSpeed launchers. Left out: pdsh.",
        question="Which launcher should be used on several machines?",
        asked_when={"num_machines": (MORE_THAN_ONE,)},
        suggested="pdsh",
    )


def check_deepspeed_file(settings: Resolution, must_exist: bool = True) -> None:
    """Reject options that the DeepSpeed configuration file gives a value too.

    Args:
        settings: every option, as resolved.
        must_exist: whether a missing file is an error, which it is not if nothing is started on this machine.

    Raises:
        ConfigurationError: the file cannot be read, or it sets an option too; the message names both places and values.
    """
    path = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or path is None or not (must_exist or os.path.exists(expand(path))):
        return
    content = read_deepspeed_file(path, settings.where("deepspeed_config_file"))
    conflicts: dict[str, str] = {}
    for name, key in FILE_PATHS.items():
        value = look_up(content, key)
        if settings.is_set(name) and value not in (None, "auto"):
            conflicts[name] = f"{path} has {key}: {json.dumps(value)}"
    precision = next((name for name in ("fp16", "bf16") if look_up(content, f"{name}.enabled") is True), None)
    differs = precision is not None and precision != (settings["mixed_precision"] or "no")
    if not conflicts and not (differs and settings.is_set("mixed_precision")):
        return
    if differs:
        conflicts["mixed_precision"] = f"{path} enables {precision}"
    places = {name: settings.where(name) if settings.is_set(name) else f"{name} (not set)" for name in conflicts}
    raise both_set({name: f"{places[name]}, {in_file}" for name, in_file in conflicts.items()})


def both_set(pairs: Mapping[str, str]) -> ConfigurationError:
    """Return the error for options that the DeepSpeed configuration file sets too, with both places of each."""
    return ConfigurationError(
        f"When using `deepspeed_config_file`, the following accel config variables will be ignored: {list(pairs)}. "
        "Please specify them appropriately in the DeepSpeed config file. If you are using an accel config file, remove "
        "other config variables mentioned in the above specified list. The easiest method is to create a new config "
        "following the questionnaire via `accel config`. It will only ask for the necessary config variables when "
        f"using `deepspeed_config_file`. Both set: {'; '.join(pairs.values())}."
    )


def read_deepspeed_file(path: str, where: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration; ``where`` is the setting that names it, for the message."""
    try:
        content = json.loads(expand(path).read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    except OSError as error:
        raise ConfigurationError(
            f"{where}: {error.strerror}. Give the path of a DeepSpeed configuration in JSON."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where}: a DeepSpeed configuration is a JSON object, not {type(content).__name__}.")
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: reject duplicate keys, which json accepts and DeepSpeed rejects."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigurationError(
                f"the key {key!r} is given twice, as {json.dumps(seen[key])} and {json.dumps(value)}. Remove one."
            )
        seen[key] = value
    return seen
