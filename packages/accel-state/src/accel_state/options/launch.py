"""What is started, where and on what: script, type of run, devices, numbers of processes, engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from .declaration import OptionGroup, option

# The names of these enumerations are also their values.
LOCAL_TYPES = tuple(DistributedType.__members__)
PARALLEL_TYPES = tuple(name for name in LOCAL_TYPES if name.startswith("MULTI_"))
ACCELERATED_TYPES = tuple(name for name in PARALLEL_TYPES if name != DistributedType.MULTI_CPU.value)
CLOUD_TYPES = tuple(SageMakerDistributedType.__members__)


@dataclass(frozen=True)
class RunOptions(OptionGroup):
    """The type of run."""

    title = "type of run"
    description = "Usually set by a configuration file. Left out, it is derived from the other options and the machine."

    compute_environment: str = option(
        ComputeEnvironment.LOCAL_MACHINE.value,
        choices=ComputeEnvironment.__members__,
        # Numbers, as the first versions of this format wrote them.
        synonyms={"0": "LOCAL_MACHINE", "1": "AMAZON_SAGEMAKER"},
        help="LOCAL_MACHINE: this machine, or several of your own. AMAZON_SAGEMAKER: a SageMaker training job.",
        question="In which compute environment are you running?",
    )
    distributed_type: str | None = option(
        choices=(*LOCAL_TYPES, *(name for name in CLOUD_TYPES if name not in LOCAL_TYPES)),
        synonyms={"TPU": "XLA", "MPS": "NO"},
        metavar="TYPE",
        help="DEEPSPEED, FSDP, MEGATRON_LM, XLA and MULTI_CPU have the effect of --use_deepspeed, --use_fsdp, "
        "--use_megatron_lm, --tpu and --cpu. DATA_PARALLEL and MODEL_PARALLEL are for SageMaker. The other types "
        "follow from the device and the number of processes, and do not have to be set.",
        question="Which type of machine are you using?",
    )


_once = functools.partial(option, key=None, env=None)


@dataclass(frozen=True)
class ScriptOptions(OptionGroup):
    """Options of a single launch, which a configuration file cannot set."""

    title = "script"

    config_file: str | None = option(
        key=None,
        metavar="FILE",
        help="YAML or JSON file with values for the options below. Left out, default_config.yaml (or .json) in the "
        "directory accel of $HF_HOME, else of $XDG_CACHE_HOME/huggingface, else of ~/.cache/huggingface, if it exists.",
    )
    module: bool = _once(False, short="-m", help="The script is the name of a module, to run with python -m.")
    no_python: bool = _once(False, help="The script is an executable: do not run it with python.")
    quiet: bool = _once(False, short="-q", help="Print errors and tracebacks only, without the launcher's notes.")
    dry_run: bool = _once(
        False, help="Print what would be started on each machine, with its environment, without starting anything."
    )
    json: bool = _once(False, help="With --dry-run: print the result as JSON.")
    as_accelerate: bool = _once(
        False,
        env="ACCEL_COMPAT",
        help="Scripts and libraries that import accelerate get accel. Nothing is installed. Needs accel-compat.",
    )


_BUILT_IN = "these optimizations are part of torch and always on"


def parse_gpu_ids(text: str) -> str:
    """Check a comma-separated list of device indices or UUIDs; "all" is returned unchanged."""
    if text.lower() == "all":
        return "all"
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not entry or entries.count(entry) > 1 or any(letter.isspace() for letter in entry):
            raise ValueError(f"{text!r} is not a comma-separated list of different GPU ids, such as 0,1,3 (or all)")
        if not entry.isdigit() and not entry[0].isalpha():
            raise ValueError(f"{entry!r} is neither the index of a GPU (0, 1, ...) nor its UUID (GPU-...), nor all")
    return ",".join(entries)


@dataclass(frozen=True)
class HardwareOptions(OptionGroup):
    """Devices."""

    title = "hardware"

    multi_gpu: bool = option(
        False,
        help="Require GPUs: one process per visible GPU unless --num_processes is given; fails with fewer GPUs.",
    )
    gpu_ids: str | None = option(
        parser=parse_gpu_ids,
        metavar="IDS",
        help="GPUs of this machine to use, by index or UUID, such as 0,1,3; all uses every GPU.",
        question="Which GPUs (by id) should be used for training on this machine, as a comma-separated list?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "num_machines": (1,), "cpu": (False,)},
        suggested="all",
    )
    tpu: bool = option(
        False, env="ACCELERATE_USE_TPU", implied_by=("distributed_type", ("XLA",)), help="Train on the cores of a TPU."
    )
    enable_cpu_affinity: bool = option(
        False,
        env="ACCELERATE_CPU_AFFINITY",
        exported=True,
        help="Bind each process to the CPU cores closest to its GPU (NUMA affinity).",
        question="Should each process be bound to the CPU cores closest to its GPU?",
        asked_when={"distributed_type": ACCELERATED_TYPES, "cpu": (False,)},
    )
    ipex: bool = option(
        False,
        env="ACCELERATE_USE_IPEX",
        key="ipex_config.ipex",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files, without effect: torch includes these optimizations.",
    )
    use_xpu: bool = option(
        False,
        key="ipex_config.use_xpu",
        retired=_BUILT_IN,
        help="Accepted for older command lines and files, without effect: Intel GPUs are detected automatically.",
    )
    use_mps_device: bool = option(
        False,
        retired="the GPU of an Apple machine is detected automatically",
        help="Accepted for older command lines and files, without effect: Apple GPUs are detected automatically.",
    )


_switch = functools.partial(option, exported=True)


@dataclass(frozen=True)
class ParadigmOptions(OptionGroup):
    """At most one engine; FSDP can be combined with a device mesh."""

    title = "training engine"
    description = (
        "At most one of DeepSpeed, FSDP, Megatron-LM and --ft. Left out, every process holds a full copy of the model."
    )

    use_deepspeed: bool = _switch(
        False,
        implied_by=("distributed_type", ("DEEPSPEED",)),
        help="Train with DeepSpeed.",
        question="Do you want to use DeepSpeed?",
        asked_when={"distributed_type": ("NO", *PARALLEL_TYPES)},
    )
    use_fsdp: bool = _switch(
        False,
        implied_by=("distributed_type", ("FSDP",)),
        help="Train with PyTorch FullyShardedDataParallel.",
        question="Do you want to use FullyShardedDataParallel?",
        asked_when={"distributed_type": PARALLEL_TYPES, "use_deepspeed": (False,)},
    )
    use_megatron_lm: bool = _switch(
        False,
        implied_by=("distributed_type", ("MEGATRON_LM",)),
        help="Train with Megatron-LM.",
        question="Do you want to use Megatron-LM?",
        asked_when={
            "distributed_type": PARALLEL_TYPES,
            **dict.fromkeys(("use_deepspeed", "use_fsdp"), (False,)),
        },
    )
    use_parallelism_config: bool = _switch(
        False,
        implied_by=("parallelism_config", ()),
        help="Arrange the processes as a device mesh of the sizes below; implied by a parallelism_config in a file.",
        question="Do you want to combine several kinds of parallelism (a device mesh)?",
        asked_when={"use_fsdp": (True,)},
    )
    ft: bool = _switch(
        False,
        help="Train with replicas that continue without those that are killed, which rejoin after a restart (torchft).",
    )
    strategy: str | None = _switch(
        metavar="NAME",
        help="Train with a strategy by its registered name, such as one that a package adds under the entry point "
        "accel.strategies, with its default settings. The options above set the engines that have options.",
    )
