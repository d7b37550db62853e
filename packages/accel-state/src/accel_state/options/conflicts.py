"""Settings that contradict one another: the stronger one counts, and of two equally strong ones the user must choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import ConfigurationError
from .option import OptionGroup
from .resolution import Resolution, Setting, Source
from .run_type import CLOUD_TYPES

# What trains the model, and the kind of run it makes; at most one of them.
ENGINES: Mapping[str, str] = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
}

_SAME_IN_VERSION_2: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
"""What sharding strategies of FSDP 1 say of resharding after the forward pass in version 2."""

_HYBRID = (
    "keeps a copy on each machine by a mesh: --parallelism_config_dp_replicate_size and "
    "--parallelism_config_dp_shard_size"
)
_ONLY_IN_VERSION_1: Mapping[str, Mapping[object, str]] = {
    "fsdp_sharding_strategy": {
        "NO_SHARD": "divides every model: leave out --use_fsdp to train whole ones",
        "HYBRID_SHARD": _HYBRID,
        "HYBRID_SHARD_ZERO2": _HYBRID,
    },
    "fsdp_backward_prefetch": {
        "BACKWARD_POST": "fetches the next parameters before gradients are reduced: leave it out"
    },
    "fsdp_forward_prefetch": {
        True: "fetches ahead by itself (model.set_modules_to_forward_prefetch asks for more): leave it out"
    },
    "fsdp_use_orig_params": {False: "always keeps the original parameters: leave it out"},
    "fsdp_state_dict_type": {
        "LOCAL_STATE_DICT": "writes SHARDED_STATE_DICT, for any number of processes, or FULL_STATE_DICT"
    },
}
"""Options and their values that version 2 has not, and what it does instead."""


def check(settings: Resolution) -> Resolution:
    """Decide between settings that cannot both hold, and refuse those that are wrong together.

    Args:
        settings: every option, as resolved.

    Returns:
        The same, with at most one engine on, and with ``distributed_type`` saying which.

    Raises:
        ConfigurationError: two settings of the same strength contradict each other, or a value is wrong beside another
            one; the message names both, with file and line where they come from one.
    """
    settled = _settle_version_2(_settle_kind(_settle_engine(settings)))
    for rule in RULES:
        rule(settled)
    return settled


def weaker(one: Setting, other: Setting) -> Setting | None:
    """Which of two contradicting settings gives way; None where both were set in the same way."""
    if one.source is other.source:
        return None
    return min(one, other, key=lambda setting: setting.source.strength)


def _settle_engine(settings: Resolution) -> Resolution:
    on = [settings.settings[name] for name in ENGINES if name in settings.settings and settings[name]]
    if settings.settings["cpu"].value and any(setting.option.name == "tpu" for setting in on):
        on.append(settings.settings["cpu"])
        on = [setting for setting in on if setting.option.name in ("cpu", "tpu")]
    while len(on) > 1:
        loser = weaker(on[0], on[1])
        if loser is None:
            raise ConfigurationError(f"{on[0].where} and {on[1].where} contradict each other. Give one of them.")
        winner = on[1] if loser is on[0] else on[0]
        on.remove(loser)
        settings = settings.changed(replace(loser, value=False, source=winner.source, where=winner.where))
    return settings


def _settle_kind(settings: Resolution) -> Resolution:
    """Let ``distributed_type`` say what the switches say."""
    kind = settings.settings["distributed_type"]
    for name, engine in ENGINES.items():
        switch = settings.settings[name]
        if switch.value and kind.value != engine:
            return settings.changed(replace(kind, value=engine, source=switch.source, where=switch.where))
        if not switch.value and kind.value == engine:
            kind = replace(kind, value=None, source=switch.source, where=switch.where)
    return settings.changed(kind)


def _settle_version_2(settings: Resolution) -> Resolution:
    """Say in the words of version 2 of FSDP what is asked for in those of version 1, where it is the same; a note tells
    the user.
    """
    if not settings["use_fsdp"] or settings["fsdp_version"] != 2:
        return settings
    notes = []
    if settings["fsdp_backward_prefetch"] == "BACKWARD_PRE":
        notes.append(f"{settings.where('fsdp_backward_prefetch')} can be left out: --fsdp_version 2 always does so")
    strategy, reshard = settings.settings["fsdp_sharding_strategy"], settings.settings["fsdp_reshard_after_forward"]
    if strategy.value in _SAME_IN_VERSION_2 and settings.is_set("fsdp_sharding_strategy"):
        wanted = _SAME_IN_VERSION_2[strategy.value]
        if settings.is_set("fsdp_reshard_after_forward") and reshard.value is not wanted:
            raise ConfigurationError(
                f"{strategy.where} means --fsdp_reshard_after_forward {str(wanted).lower()} with --fsdp_version 2, "
                f"and {reshard.where} "
                "says otherwise. Leave out the sharding strategy, which is of version 1."
            )
        settings = settings.changed(replace(reshard, value=wanted, source=strategy.source, where=strategy.where))
        notes.append(
            f"{strategy.where} is of version 1; with --fsdp_version 2 it is --fsdp_reshard_after_forward "
            f"{str(wanted).lower()}"
        )
    return replace(settings, file_notes=(*settings.file_notes, *notes))


def _check_place(settings: Resolution) -> None:
    kind = settings["distributed_type"]
    if settings["compute_environment"] == "AMAZON_SAGEMAKER":
        wrong, allowed = kind is not None and kind not in CLOUD_TYPES, ", ".join(CLOUD_TYPES)
    else:
        wrong, allowed = (
            kind in CLOUD_TYPES and kind != "NO",
            "a kind of local run, or compute_environment AMAZON_SAGEMAKER",
        )
    if wrong:
        raise ConfigurationError(
            f"{settings.where('distributed_type')} does not go with compute_environment "
            f"{settings['compute_environment']} "
            f"({settings.where('compute_environment')}). Allowed: {allowed}."
        )


def _check_rank(settings: Resolution) -> None:
    machines = settings["num_machines"]
    if settings["machine_rank"] >= machines and settings.is_set("machine_rank"):
        raise ConfigurationError(
            f"{settings.where('machine_rank')}: with {machines} machine(s), ranks go from 0 to {machines - 1}. "
            "Set --num_machines to the number of machines, or correct the rank."
        )


def _check_effect(settings: Resolution) -> None:
    """Refuse what a user typed and what would have no effect. A variable or a file may have been made for several runs."""
    for group in settings.groups:
        for opt in group.options():
            setting = settings.settings[opt.name]
            if (
                setting.source is Source.COMMAND_LINE
                and not settings.is_enabled(group)
                and _is_decided(settings, group)
            ):
                raise ConfigurationError(
                    f"{setting.where} has no effect without {_switch_text(settings, group)}. Add it, or leave the "
                    "option out."
                )


def _is_decided(settings: Resolution, group: type[OptionGroup]) -> bool:
    # Where nobody says which precision to use, the script may.
    return group.enabled_by is not None and settings[group.enabled_by[0]] is not None


def _switch_text(settings: Resolution, group: type[OptionGroup]) -> str:
    name, value = group.enabled_by or ("", None)
    return f"--{name}" if value is True else f"--{name} {value}"


def _check_fsdp(settings: Resolution) -> None:
    if not settings["use_fsdp"]:
        return
    if settings["fsdp_version"] == 2:
        _check_version_2(settings)
        return
    if settings["fsdp_cpu_ram_efficient_loading"] and not settings["fsdp_sync_module_states"]:
        if not settings.is_set("fsdp_cpu_ram_efficient_loading"):
            return
        raise ConfigurationError(
            f"{settings.where('fsdp_cpu_ram_efficient_loading')} needs --fsdp_sync_module_states true, not "
            f"{settings.where('fsdp_sync_module_states')}: the other processes would train random weights."
        )


def _check_version_2(settings: Resolution) -> None:
    """Refuse what only version 1 of FSDP can do."""
    for name, values in _ONLY_IN_VERSION_1.items():
        instead = values.get(settings[name])
        if instead is not None and settings.is_set(name):
            raise ConfigurationError(
                f"{settings.where(name)} is of --fsdp_version 1, and {settings.where('fsdp_version')} asks for 2, "
                f"which {instead}. A "
                "file of version 1 is converted by `accel to-fsdp2 --config_file FILE`."
            )


def _check_deepspeed(settings: Resolution) -> None:
    if not settings["use_deepspeed"]:
        return
    if settings["deepspeed_inclusion_filter"] and settings["deepspeed_exclusion_filter"]:
        raise ConfigurationError(
            f"{settings.where('deepspeed_inclusion_filter')} and {settings.where('deepspeed_exclusion_filter')} "
            "contradict each other. "
            "Give one of them."
        )
    stage = settings["zero_stage"]
    for name, least in (("offload_optimizer_device", 1), ("offload_param_device", 3)):
        if stage is not None and stage < least and settings[name] not in (None, "none"):
            raise ConfigurationError(
                f"{settings.where(name)} needs --zero_stage {least}{' or more' if least < 3 else ''}, not "
                f"{settings.where('zero_stage')}."
            )


def _check_mesh(settings: Resolution) -> None:
    if not settings["use_parallelism_config"]:
        return
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
    sizes = {f"parallelism_config_{axis}_size": settings[f"parallelism_config_{axis}_size"] for axis in axes}
    if settings["parallelism_config_cp_size"] > 1 and settings["parallelism_config_sp_size"] > 1:
        raise ConfigurationError(
            f"{settings.where('parallelism_config_cp_size')} and {settings.where('parallelism_config_sp_size')} "
            "contradict each other: "
            "a sequence is shared in one way. Leave one of them at 1."
        )
    if settings["use_fsdp"] and settings["parallelism_config_dp_shard_size"] > 1 and settings["fsdp_version"] != 2:
        raise ConfigurationError(
            f"{settings.where('parallelism_config_dp_shard_size')} needs --fsdp_version 2, not "
            f"{settings['fsdp_version']} "
            f"({settings.where('fsdp_version')})."
        )
    processes = settings["num_processes"]
    if processes is not None and math.prod(sizes.values()) != processes:
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"{factors} = {math.prod(sizes.values())}, but there are {processes} processes "
            f"({settings.where('num_processes')})."
        )


def _check_megatron(settings: Resolution) -> None:
    processes = settings["num_processes"]
    if not settings["use_megatron_lm"] or processes is None:
        return
    tensor, pipeline = settings["megatron_lm_tp_degree"], settings["megatron_lm_pp_degree"]
    context = settings["megatron_lm_context_parallel_size"] or 1
    if processes % (tensor * pipeline * context):
        raise ConfigurationError(
            f"{settings.where('num_processes')} is not a multiple of megatron_lm_tp_degree={tensor} x "
            f"megatron_lm_pp_degree={pipeline} x "
            f"megatron_lm_context_parallel_size={context} = {tensor * pipeline * context}."
        )


RULES: tuple[Callable[[Resolution], None], ...] = (
    _check_place,
    _check_rank,
    _check_effect,
    _check_fsdp,
    _check_deepspeed,
    _check_mesh,
    _check_megatron,
)
