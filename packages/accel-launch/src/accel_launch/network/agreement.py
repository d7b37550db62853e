"""What the launchers of a run must agree on before anything starts, and how disagreements are shown. Torch-free.

A fact is refused if machines that differ in it would hang or compute something else, and only warned about otherwise.
Facts of a machine alone (its rank, its devices, its folders) are not compared. Secrets are not sent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from accel_state.env import read_str
from accel_state.options.resolution import Resolution
from accel_state.options.resources import MachineRange
from accel_state.secrets import hide_in_text, is_secret_name

from ..entrypoint import Entrypoint
from ..launch_plan import LaunchPlan
from .records import FIRST_SEAT, Machine

_MUST, _SHOULD = "must ", "should "

# Settings of a machine, of a single launch, or that facts of their own cover.
_OWN = frozenset((
    *("machine_rank", "main_process_ip", "main_process_port", "same_network", "num_processes", "num_machines"),
    *("config_file", "gpu_ids", "log_dir", "tee", "role", "quiet", "dry_run", "json", "oversubscribe", "monitor"),
    *("monitor_port", "hang_report_seconds"),
    *("enable_cpu_affinity", "multi_gpu", "num_cpu_threads_per_process", "compute_environment", "distributed_type"),
    *("mpirun_hostfile", "mpirun_ccl"),
    *("nproc_per_node", "rdzv_endpoint", "standalone", "redirects", "local_ranks_filter", "log_line_prefix_template"),
    "shutdown_timeout",
))  # fmt: skip
# Settings that change when something is noticed, or where something is stored, not what is computed.
_TOLERATED = frozenset((
    *("monitor_interval", "rdzv_conf", "machine_timeout"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
))  # fmt: skip
# Versions whose differences change results or messages between ranks.
_DISTRIBUTIONS = ("accel", "accel-state", "accel-data", "accel-launch", "torch")
_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
FACTS_VARIABLE = "ACCEL_DOCTOR_FACTS"
"""In it ``accel doctor`` passes the facts of the launch that it checks, to be compared instead of those of its own."""
_SHOWN_MACHINES = 8
_SHOWN_LENGTH = 60


def facts_of_plan(plan: LaunchPlan) -> dict[str, str]:
    """Return the facts of this machine for ``accel launch``."""
    if given := read_str(FACTS_VARIABLE):
        return {str(name): str(value) for name, value in json.loads(given).items()}
    processes = {
        f"{_MUST}num_processes": str(plan.num_processes),
        f"{_MUST}processes of each machine": str(plan.local_processes),
    }
    facts = {
        f"{_MUST}num_machines": str(plan.num_machines),
        # The machines of a range may have different numbers of processes.
        **({} if isinstance(plan.num_machines, MachineRange) else processes),
        f"{_MUST}script": describe_script(plan.entrypoint),
        f"{_SHOULD}arguments of the script": hide_in_text(" ".join(plan.entrypoint.args)),
        f"{_SHOULD}OMP_NUM_THREADS": plan.full_environment().get("OMP_NUM_THREADS", ""),
    }
    return facts | _facts_of_settings(plan.settings) | facts_of_environment()


def facts_of_environment() -> dict[str, str]:
    """Versions, and variables that change how ranks talk to each other."""
    facts = {f"{_SHOULD}Python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        version = _version(name)
        facts[f"{_MUST}version of {name}"] = version.partition("+")[0]
        facts[f"{_SHOULD}build of {name}"] = version
    return facts | {f"{_SHOULD}{name}": read_str(name, "") or "" for name in _VARIABLES}


def _facts_of_settings(settings: Resolution) -> dict[str, str]:
    """Return the settings of enabled groups that are not the default.

    A file is represented by its digest, since its path may differ.
    """
    facts = {}
    enabled = [group for group in settings.groups if settings.is_enabled(group)]
    for option in itertools.chain.from_iterable(group.options() for group in enabled):
        value = settings[option.name]
        if option.name in _OWN or option.secret or is_secret_name(option.name) or value in (None, option.default):
            continue
        level = _SHOULD if option.name in _TOLERATED else _MUST
        text = option.format(value)
        file = Path(text).expanduser() if option.name.rpartition("_")[2] == "file" else None
        facts[level + option.name] = hide_in_text(text) if file is None else _digest(file)
    return facts


def describe_script(entrypoint: Entrypoint) -> str:
    """Name and digest of a script, module or executable; of a folder or package, that of its ``__main__.py``."""
    path = Path(entrypoint.name)
    if entrypoint.kind == "module":
        spec = importlib.util.find_spec(entrypoint.name.partition(".")[0])
        root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
        parts = entrypoint.name.split(".")[1:]
        path = root.joinpath(*parts)
        path = path.with_suffix(".py") if parts and path.with_suffix(".py").is_file() else path / "__main__.py"
    elif path.is_dir() and not zipfile.is_zipfile(path):
        path = path / "__main__.py"
    return _digest(path, Path(entrypoint.name).name)


def _digest(path: Path, name: str = "") -> str:
    """Return a file's name and digest; its name alone if it cannot be read."""
    try:
        return f"{name or path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return name or path.name


def _version(name: str) -> str:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    # ``distribution.version`` parses all of the metadata, which takes three times as long.
    found = re.search(r"^Version:\s*(\S+)", distribution.read_text("METADATA") or "", flags=re.MULTILINE)
    return found[1] if found else distribution.version


def compare(machines: Sequence[Machine], then: str = "nothing was started") -> tuple[str, str]:
    """Tables of what is refused, and of what is warned about; empty where the machines agree.

    A machine without facts, such as one that was asked to start a function of a notebook, is not compared.

    Args:
        machines: with their facts.
        then: what follows from a refusal.
    """
    machines = sorted((machine for machine in machines if machine.facts), key=lambda machine: machine.rank)
    names = sorted({name for machine in machines for name in machine.facts})
    differing = [name for name in names if len({machine.facts.get(name) for machine in machines}) > 1]
    refused = [name for name in differing if name.startswith(_MUST)]
    warned = [name for name in differing if name.startswith(_SHOULD) and not _is_implied(name, refused)]
    texts = ["", ""]
    if refused:
        texts[0] = f"the machines disagree (see the table), so {then}. Give the same on every machine.\n" + _table(
            refused + warned, machines
        )
    if warned:
        texts[1] = "the machines differ, which does not stop them:\n" + _table(warned, machines)
    return texts[0], texts[1]


def _is_implied(name: str, refused: Sequence[str]) -> bool:
    """Return True if a difference follows from one that is refused."""
    return name.replace(f"{_SHOULD}build of", f"{_MUST}version of") in refused


def _table(names: Sequence[str], machines: Sequence[Machine]) -> str:
    rows = [("what", "value", "machine ranks")]
    for name in names:
        label = name.removeprefix(_MUST).removeprefix(_SHOULD)
        by_value: dict[str, list[Machine]] = {}
        for machine in machines:
            by_value.setdefault(machine.facts.get(name, "(default)") or "(not set)", []).append(machine)
        for value, those in by_value.items():
            shown = value if len(value) <= _SHOWN_LENGTH else value[: _SHOWN_LENGTH - 3] + "..."
            rows.append((label, shown, _listed(those)))
            label = ""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {label:<{widths[0]}}  {value:<{widths[1]}}  {who}" for label, value, who in rows)


def _listed(machines: Sequence[Machine]) -> str:
    few = itertools.islice(machines, _SHOWN_MACHINES)
    shown = [one.host if one.rank >= FIRST_SEAT else f"{one.rank} ({one.host})" for one in few]
    left = len(machines) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")
