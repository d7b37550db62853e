"""torchrun's options: those that say the same as one of ours, and answers to the others. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution

from .accelerators.registry import find_visible
from .launch_context import LaunchContext, count_machines

_FILTERS = "Filter the files of --tee or --redirects, for example with `grep -h PATTERN LOG_DIR/*/*/*/stdout.log`."
_ANSWERS = {
    "start_method": "Scripts are always started as new processes; notebook_launcher has start_method for functions.",
    "event_log_handler": "The launcher records no events: --debug shows its log, --log_dir keeps the reports of ranks.",
    "run_path": "Scripts are run that way, by path in the interpreter that the launcher starts: leave it out.",
    "duplicate_stdout_filters": _FILTERS,
    "duplicate_stderr_filters": _FILTERS.replace("stdout", "stderr"),
    "local_addr": "The own address follows from the network interface: set GLOO_SOCKET_IFNAME (on GPUs "
    "NCCL_SOCKET_IFNAME) to its name.",
    "logs_specs": "--log_dir, --tee, --redirects and --local_ranks_filter say where output goes.",
    "numa_binding": "--enable_cpu_affinity binds each process to the CPUs close to its GPU, as --numa-binding node.",
    "print_completion": "There is no completion for shells: `accel launch --help` lists the options.",
    "signals_to_handle": "SIGINT, SIGTERM, SIGHUP and SIGQUIT end the run, and SIGUSR1 and SIGUSR2 are forwarded to "
    "the processes: leave it out.",
    "virtual_local_rank": "Each process sees all GPUs, and uses that of its LOCAL_RANK, which PartialState().device "
    "selects.",
}
UNUSED: dict[str, str] = {
    flag: answer for name, answer in _ANSWERS.items() for flag in (f"--{name}", f"--{name.replace('_', '-')}")
}
"""Options of torchrun that are not accepted, and the answer to each."""


def with_torchrun_options(settings: Resolution, context: LaunchContext, variables: Mapping[str, str]) -> Resolution:
    """Return the settings with the values that ``--nproc-per-node``, ``--rdzv-endpoint`` and ``--standalone`` imply.

    Args:
        settings: every option.
        context: where this launcher runs, which may decide the number of machines.
        variables: the environment, which says what devices are visible.

    Raises:
        ConfigurationError: one of them contradicts the option that it stands for.
    """
    if settings["standalone"] and settings["num_machines"] > 1:
        raise ConfigurationError(
            f"{settings.where('standalone')} is for one machine, but {settings.where('num_machines')}. Leave one out."
        )
    if settings["nproc_per_node"] is not None:
        workers = _workers(settings, variables)
        settings = _implied(settings, "nproc_per_node", "num_processes", workers * count_machines(settings, context))
    if settings["rdzv_endpoint"] is not None and not settings["standalone"]:
        host, port = _split(settings["rdzv_endpoint"])
        settings = _implied(settings, "rdzv_endpoint", "main_process_ip", host)
        if port is not None:
            settings = _implied(settings, "rdzv_endpoint", "main_process_port", port)
    return settings


def _implied(settings: Resolution, cause: str, name: str, value: Any) -> Resolution:
    """Return the settings with a value that another option implies."""
    current, given = settings.settings[name], settings.settings[cause]
    if settings.is_set(name) and current.value != value and current.source.strength >= given.source.strength:
        raise ConfigurationError(
            f"{given.where} means {name} {value}, but {current.where} contradicts it. Give one of them."
        )
    return settings.changed(replace(current, value=value, source=given.source, where=given.where))


def _workers(settings: Resolution, variables: Mapping[str, str]) -> int:
    text = settings["nproc_per_node"]
    if text.isdigit():
        return int(text)
    visible = 0 if text == "cpu" or settings["cpu"] else find_visible(variables).count
    if visible == 0 and text in ("gpu", "xpu"):
        reason = "--cpu is set" if settings["cpu"] else "no GPU is visible on this machine"
        raise ConfigurationError(f"{settings.where('nproc_per_node')}: {reason}. Give a number of processes.")
    return visible or os.cpu_count() or 1


def _split(endpoint: str) -> tuple[str, int | None]:
    host, _, port = endpoint.rpartition(":") if not endpoint.endswith("]") else (endpoint, "", "")
    if not host:  # no port
        host, port = port, ""
    return host.strip("[]"), int(port) if port else None
