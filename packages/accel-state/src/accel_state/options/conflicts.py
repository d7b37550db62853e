"""Resolves contradicting settings: the stronger source wins; for equally strong ones the user must choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import ConfigurationError
from ..humanize import counted
from .fsdp_versions import RESHARD_OF_STRATEGY, UNSUPPORTED, WITHOUT_EFFECT
from .launch import CLOUD_TYPES
from .resolution import Resolution, Source
from .resources import MachineRange

# The engines, and the distributed_type of a run with each; at most one of them is on.
ENGINES: Mapping[str, str] = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
}


def check(settings: Resolution) -> Resolution:
    """Leave at most one engine on, with its ``distributed_type``, and reject invalid combinations.

    Raises:
        ConfigurationError: two settings of the same strength contradict each other, or a combination is invalid; the
            message names both, with file and line.
    """
    settled = _settle_type(_settle_engine(settings))
    if settled["use_fsdp"] and settled["fsdp_version"] == 2:
        settled = _settle_version_2(settled)
    if settled["use_deepspeed"]:
        settled = _settle_stage(settled)
    for switch, rule in RULES:
        if switch is None or settled[switch]:
            rule(settled)
    return settled


def _settle_engine(settings: Resolution) -> Resolution:
    engines = ("tpu", "cpu") if settings["cpu"] and settings["tpu"] else ENGINES
    on = [settings.settings[name] for name in engines if settings[name]]
    while len(on) > 1:
        if on[0].source is on[1].source:
            raise ConfigurationError(f"{on[0].where} and {on[1].where} contradict each other. Give one of them.")
        loser, winner = sorted(on[:2], key=lambda setting: setting.source.strength)
        on.remove(loser)
        settings = settings.changed(replace(loser, value=False, source=winner.source, where=winner.where))
    return settings


def _settle_type(settings: Resolution) -> Resolution:
    """Make ``distributed_type`` agree with the engine switches."""
    run_type = settings.settings["distributed_type"]
    for name, engine in ENGINES.items():
        switch = settings.settings[name]
        if switch.value and run_type.value != engine:
            return settings.changed(replace(run_type, value=engine, source=switch.source, where=switch.where))
        if not switch.value and run_type.value == engine:
            settings = settings.changed(replace(run_type, value=None, source=switch.source, where=switch.where))
    return settings


def _settle_version_2(settings: Resolution) -> Resolution:
    """Translate settings of FSDP 1 that have an equivalent in FSDP 2, with a note to the user."""
    notes = []
    for field, (value, instead) in WITHOUT_EFFECT.items():
        name = f"fsdp_{field}"
        if name in settings.settings and settings[name] == value and settings.is_set(name):
            notes.append(f"{settings.where(name)} has no effect with --fsdp_version 2, which {instead}")
            settings = settings.changed(replace(settings.settings[name], value=None, source=Source.DEFAULT))
    if settings["fsdp_backward_prefetch"] == "BACKWARD_PRE":
        notes.append(f"{settings.where('fsdp_backward_prefetch')} can be left out: --fsdp_version 2 always does this")
    strategy, reshard = settings.settings["fsdp_sharding_strategy"], settings.settings["fsdp_reshard_after_forward"]
    if ("sharding_strategy", strategy.value) not in UNSUPPORTED and settings.is_set("fsdp_sharding_strategy"):
        wanted = RESHARD_OF_STRATEGY[strategy.value]
        equivalent = f"--fsdp_reshard_after_forward {str(wanted).lower()}"
        if settings.is_set("fsdp_reshard_after_forward") and reshard.value is not wanted:
            raise ConfigurationError(
                f"{strategy.where} means {equivalent} with --fsdp_version 2, which contradicts {reshard.where}. Leave "
                "out the sharding strategy, an option of version 1."
            )
        settings = settings.changed(replace(reshard, value=wanted, source=strategy.source, where=strategy.where))
        notes.append(f"{strategy.where} is an option of version 1; with --fsdp_version 2 it is {equivalent}")
    return replace(settings, file_notes=(*settings.file_notes, *notes))


def _settle_stage(settings: Resolution) -> Resolution:
    """Turn off offloading that has no effect at the ZeRO stage, with a note; recipes set it for every stage."""
    stage = settings["zero_stage"]
    if stage is None:
        return settings
    notes = []
    for name, least in (("offload_optimizer_device", 1), ("offload_param_device", 3)):
        if stage < least and settings[name] not in (None, "none"):
            notes.append(
                f"{settings.where(name)} has no effect with {settings.where('zero_stage')}, only from {least} on"
            )
            settings = settings.changed(replace(settings.settings[name], value="none"))
    return replace(settings, file_notes=(*settings.file_notes, *notes))


def _check_run_type(settings: Resolution) -> None:
    run_type = settings["distributed_type"]
    if settings["compute_environment"] == "AMAZON_SAGEMAKER":
        wrong, allowed = run_type is not None and run_type not in CLOUD_TYPES, ", ".join(CLOUD_TYPES)
    else:
        wrong = run_type in CLOUD_TYPES and run_type != "NO"
        allowed = "a type of local run, or compute_environment AMAZON_SAGEMAKER"
    if wrong:
        raise ConfigurationError(
            f"{settings.where('distributed_type')} cannot be used with compute_environment "
            f"{settings['compute_environment']} ({settings.where('compute_environment')}). Allowed: {allowed}."
        )
    of_devices = str(run_type).startswith("MULTI_") and run_type != "MULTI_CPU"
    if (
        of_devices
        and settings["cpu"]
        and settings.settings["cpu"].source is settings.settings["distributed_type"].source
    ):
        raise ConfigurationError(
            f"{settings.where('cpu')} and {settings.where('distributed_type')} contradict each other. Use "
            "distributed_type MULTI_CPU, or leave out the former."
        )


def _check_fsdp(settings: Resolution) -> None:
    if settings["fsdp_version"] == 2:
        _check_version_2(settings)
        return
    loads_on_rank_0 = settings["fsdp_cpu_ram_efficient_loading"] and settings.is_set("fsdp_cpu_ram_efficient_loading")
    if loads_on_rank_0 and not settings["fsdp_sync_module_states"]:
        raise ConfigurationError(
            f"{settings.where('fsdp_cpu_ram_efficient_loading')} needs --fsdp_sync_module_states true, not "
            f"{settings.where('fsdp_sync_module_states')}: all other processes would train random weights."
        )


def _check_version_2(settings: Resolution) -> None:
    """Reject values that only FSDP 1 supports."""
    for (field, value), instead in UNSUPPORTED.items():
        name = f"fsdp_{field}"
        if settings[name] == value and settings.is_set(name):
            raise ConfigurationError(
                f"{settings.where(name)} requires --fsdp_version 1, and {settings.where('fsdp_version')} selects 2, "
                f"which {instead}. Convert a file of version 1 with `accel to-fsdp2 --config_file FILE`."
            )


def _check_deepspeed(settings: Resolution) -> None:
    if settings["deepspeed_inclusion_filter"] and settings["deepspeed_exclusion_filter"]:
        raise ConfigurationError(
            f"{settings.where('deepspeed_inclusion_filter')} and {settings.where('deepspeed_exclusion_filter')} "
            "contradict each other. Give one of them."
        )


def _check_mesh(settings: Resolution) -> None:
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
    sizes = {f"parallelism_config_{axis}_size": settings[f"parallelism_config_{axis}_size"] for axis in axes}
    if settings["parallelism_config_cp_size"] > 1 and settings["parallelism_config_sp_size"] > 1:
        raise ConfigurationError(
            f"{settings.where('parallelism_config_cp_size')} and {settings.where('parallelism_config_sp_size')} "
            "contradict each other: context and sequence parallelism cannot be combined. Leave one of them at 1."
        )
    if settings["use_fsdp"] and settings["parallelism_config_dp_shard_size"] > 1 and settings["fsdp_version"] != 2:
        raise ConfigurationError(
            f"{settings.where('parallelism_config_dp_shard_size')} needs --fsdp_version 2, not "
            f"{settings['fsdp_version']} ({settings.where('fsdp_version')})."
        )
    # On a TPU one process shards a model over its devices.
    processes = None if settings["tpu"] else settings["num_processes"]
    if processes is not None and math.prod(sizes.values()) != processes:
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"{factors} = {math.prod(sizes.values())}, but there {'is' if processes == 1 else 'are'} "
            f"{counted(processes, 'process')} "
            f"({settings.where('num_processes')})."
        )


def _check_checkpointing(settings: Resolution) -> None:
    """Reject activation checkpointing where it has no effect: models that are sharded have options of their own."""
    if not settings["activation_checkpointing"]:
        for part in ("blocks", "mode", "every", "offload"):
            name = f"activation_checkpointing_{part}"
            if settings.is_set(name) and settings[name]:
                raise ConfigurationError(
                    f"{settings.where(name)} has no effect without --activation_checkpointing. Give it too; with FSDP "
                    "the options begin with --fsdp_activation_checkpointing."
                )
        return
    where = settings.where("activation_checkpointing")
    if settings["activation_checkpointing_offload"] and settings["activation_checkpointing_mode"] == "selective":
        raise ConfigurationError(
            f"{settings.where('activation_checkpointing_offload')} moves the inputs of blocks to the host, and not the "
            f"results that {settings.where('activation_checkpointing_mode')} keeps. Leave one of them out."
        )
    instead = {
        "use_fsdp": "Give --fsdp_activation_checkpointing true instead",
        "use_deepspeed": "Call model.gradient_checkpointing_enable() in the script instead",
        "use_megatron_lm": "Give --megatron_lm_recompute_activations true instead",
    }
    for name in (*ENGINES, "ft"):
        if settings[name]:
            raise ConfigurationError(
                f"{where} is for one process and for DDP, and cannot be combined with {settings.where(name)}. "
                f"{instead.get(name, 'Leave one of them out')}."
            )


def _check_experts(settings: Resolution) -> None:
    """Reject expert parallelism that the mesh cannot hold."""
    experts, where = settings["parallelism_config_ep_size"], settings.where("parallelism_config_ep_size")
    if experts > 1 and settings["parallelism_config_sp_size"] > 1:
        raise ConfigurationError(
            f"{where} and {settings.where('parallelism_config_sp_size')} contradict each other: the combination has "
            "not been compared with one process. Leave one of them at 1, or use cp_size."
        )
    sizes = {axis: settings[f"parallelism_config_{axis}_size"] for axis in ("dp_shard", "cp", "tp")}
    ranks = math.prod(sizes.values())
    if ranks % experts:
        factors = " x ".join(f"{axis}_size={size}" for axis, size in sizes.items())
        raise ConfigurationError(
            f"{where} does not divide {factors} = {ranks}, the processes that experts are distributed over. Choose a "
            "size that does."
        )


def _check_megatron(settings: Resolution) -> None:
    experts, processes = settings["parallelism_config_ep_size"], settings["num_processes"]
    if experts != 1:
        raise ConfigurationError(
            f"{settings.where('parallelism_config_ep_size')} has no effect on Megatron-core, which distributes experts "
            f"itself. Leave it out, and give --megatron_lm_expert_model_parallel_size {experts}."
        )
    if processes is None:
        return
    tensor, pipeline = settings["megatron_lm_tp_degree"], settings["megatron_lm_pp_degree"]
    context = settings["megatron_lm_context_parallel_size"] or 1
    if processes % (tensor * pipeline * context):
        raise ConfigurationError(
            f"{settings.where('num_processes')} is not a multiple of megatron_lm_tp_degree={tensor} x "
            f"megatron_lm_pp_degree={pipeline} x megatron_lm_context_parallel_size={context} = "
            f"{tensor * pipeline * context}."
        )


def _check_replicas(settings: Resolution) -> None:
    """Reject what cannot be combined with fault-tolerant replicas."""
    shards = settings["use_fsdp"] and settings["fsdp_version"] == 2
    for name in (*ENGINES, "use_parallelism_config"):
        if settings[name] and not (shards and name == "use_fsdp"):
            raise ConfigurationError(
                f"{settings.where('ft')} and {settings.where(name)} cannot be combined: each replica holds the full "
                "model in one process, or is sharded with --fsdp_version 2. Leave one of them out."
            )
    if (settings["processes_per_replica"] > 1) is not shards:
        raise ConfigurationError(
            f"{settings.where('ft')}: replicas of several processes are sharded by FSDP 2. Give --use_fsdp "
            "--fsdp_version 2 and --processes_per_replica N with more than one process, or none of them."
        )
    if settings["num_processes"] not in (None, 1):
        raise ConfigurationError(
            f"{settings.where('ft')} and {settings.where('num_processes')} cannot be combined. Leave it out, and set "
            "--num_replicas."
        )
    if settings["num_machines"] > 1 and settings["rdzv_backend"] != "static":
        raise ConfigurationError(
            f"{settings.where('ft')} and {settings.where('rdzv_backend')} cannot be combined: the replicas meet at "
            "torchft's lighthouse on machine 0. Leave it out, and give --machine_rank on each machine."
        )
    replicas = settings["num_replicas"] + settings["num_spares"]
    if settings["min_replicas"] > replicas:
        raise ConfigurationError(
            f"{settings.where('min_replicas')} is more than all {replicas} replicas (num_replicas and num_spares). "
            "Give a smaller number."
        )


def _check_machines(settings: Resolution) -> None:
    """Reject a rank that no machine has, and a range of machines where their number is fixed."""
    machines = settings["num_machines"]
    if settings["machine_rank"] >= machines and settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"{settings.where('machine_rank')}: with {machines} machine(s), ranks are 0 to {machines - 1}. "
            "Set --num_machines to the number of machines, or correct the rank."
        )
    if not isinstance(machines, MachineRange):
        return
    where = settings.where("num_machines")
    if settings["ft"]:
        raise ConfigurationError(
            f"{where} and {settings.where('ft')} cannot be combined: replicas come and go by themselves. Give the "
            "number of machines."
        )
    for name in ("use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu", "mpirun_hostfile"):
        if settings[name]:
            raise ConfigurationError(
                f"{where} and {settings.where(name)} cannot be combined: it needs a fixed number of processes. Give "
                "the number of machines."
            )


# Every rule, and the switch without which it has nothing to check.
RULES: tuple[tuple[str | None, Callable[[Resolution], None]], ...] = (
    (None, _check_run_type),
    ("use_fsdp", _check_fsdp),
    ("use_deepspeed", _check_deepspeed),
    ("use_parallelism_config", _check_mesh),
    (None, _check_checkpointing),
    ("use_megatron_lm", _check_megatron),
    ("use_parallelism_config", _check_experts),
    ("ft", _check_replicas),
    (None, _check_machines),
)
