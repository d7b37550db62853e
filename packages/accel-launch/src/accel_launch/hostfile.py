"""Hostfiles of mpirun and DeepSpeed, and the machines and slots that DeepSpeed's launcher uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution
from accel_state.ports import is_local


@dataclass(frozen=True)
class Host:
    """A machine of a hostfile: name or address, and the number of processes it takes, if the file gives it."""

    name: str
    slots: int | None = None

    @property
    def is_here(self) -> bool:
        """True if it is this machine."""
        return is_local(self.name)


# "host", "host:4" (Hydra), "host slots=4 max_slots=8" (Open MPI, DeepSpeed).
_LINE = re.compile(r"(?P<name>\[[0-9a-fA-F:]+\]|[^\s:#=]+)(?::(?P<colon>\d+))?(?P<further>(?:\s+\w+=\S+)*)")
_MAX_SLOTS = 1 << 16
_SLOTS = re.compile(r"\sslots=(\d+)(?!\S)")


def read_hostfile(path: str, where: str) -> tuple[Host, ...]:
    """Return the machines of a file, in order; the slots of a machine that is listed several times are added."""
    file = Path(path).expanduser()
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(read_lines(file, f"{where}: the hostfile"), 1):
        text = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip())
        if not text:
            continue
        match = _LINE.fullmatch(text)
        slots_match = _SLOTS.search(text)
        if match is None or (" slots=" in text and slots_match is None):
            raise ConfigurationError(
                f"{file}, line {number}: {text!r} is not a machine. Allowed: HOST, HOST:SLOTS, HOST slots=SLOTS."
            )
        name, slots = match["name"], match["colon"] or (slots_match[1] if slots_match else None)
        if slots and (len(slots) > 9 or int(slots) > _MAX_SLOTS):
            raise ConfigurationError(
                f"{file}, line {number}: {name} has {slots[:20]} slots. A machine has at most {_MAX_SLOTS}: one for "
                "each process."
            )
        if name in hosts:
            hosts[name] = (hosts[name] or 1) + int(slots or 1)
        else:
            hosts[name] = int(slots) if slots else None
    if not hosts:
        raise ConfigurationError(f"{where}: the hostfile lists no machine. Write one on each line.")
    return tuple(Host(name, slots) for name, slots in hosts.items())


def read_lines(file: Path, subject: str) -> list[str]:
    """Return the lines of a text file."""
    try:
        return file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigurationError(f"{subject} cannot be read: {reason}.") from None


DEFAULT_HOSTFILE = "/job/hostfile"

Pool = Mapping[str, tuple[int, ...]]
"""Slots (device indices) by host, in rank order."""


def read_pool(settings: Resolution) -> Pool:
    """Return the machines and slots of a run."""
    path = settings["deepspeed_hostfile"] or DEFAULT_HOSTFILE
    if not settings["deepspeed_hostfile"] and not Path(path).is_file():
        raise ConfigurationError(
            f"DeepSpeed's launchers for several machines need a hostfile ({settings.where('num_machines')}). Give one "
            "with --deepspeed_hostfile, with a line such as `worker-0 slots=8` for each machine, or use "
            "--deepspeed_multinode_launcher standard."
        )
    pool: dict[str, tuple[int, ...]] = {}
    for host in read_hostfile(path, settings.where("deepspeed_hostfile")):
        if host.slots is None:
            raise ConfigurationError(
                f"{path}: {host.name} has no slots. Write `{host.name} slots=N`, where N is its number of devices."
            )
        pool[host.name] = tuple(range(host.slots))
    if settings["deepspeed_inclusion_filter"] or settings["deepspeed_exclusion_filter"]:
        return _filtered(settings, pool)
    return _first_machines(settings, pool)


def _filtered(settings: Resolution, pool: Pool) -> Pool:
    included = settings["deepspeed_inclusion_filter"]
    name = "deepspeed_inclusion_filter" if included else "deepspeed_exclusion_filter"
    selected = dict(_parse(settings[name], settings.where(name), pool))
    remaining: dict[str, tuple[int, ...]] = {}
    for host, slots in pool.items():
        kept = tuple(slot for slot in slots if (slot in selected.get(host, ())) == bool(included))
        if kept:
            remaining[host] = kept
    if not remaining:
        raise ConfigurationError(f"{settings.where(name)} leaves no slots. Exclude fewer.")
    total = sum(map(len, remaining.values()))
    if settings["num_processes"] not in (None, total):
        raise ConfigurationError(
            f"{settings.where('num_processes')}, but the filters leave {total} slots. Leave num_processes out, or give "
            f"{total}."
        )
    return remaining


def _parse(text: str, where: str, pool: Pool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``worker-0@worker-1:0,2``: every slot of worker-0, two of worker-1."""
    for part in text.split("@"):
        host, _, listed = part.strip().partition(":")
        if host not in pool:
            raise ConfigurationError(f"{where}: {host!r} is not in the hostfile. Its hosts: {', '.join(pool)}.")
        try:
            slots = tuple(int(index) for index in listed.split(",")) if listed else pool[host]
        except ValueError:
            raise ConfigurationError(
                f"{where}: {part!r} is not HOST or HOST:SLOT,SLOT,... such as worker-1:0,2."
            ) from None
        if unknown := sorted(set(slots) - set(pool[host])):
            raise ConfigurationError(
                f"{where}: {host} has no slot {unknown[0]}. Its slots: {', '.join(map(str, pool[host]))}."
            )
        yield host, slots


def _first_machines(settings: Resolution, pool: Pool) -> Pool:
    """Return the first ``num_machines`` machines, with as many slots each as ``num_processes`` needs."""
    restricted = settings.is_set("num_machines") and settings["num_machines"] > 1
    machines = settings["num_machines"] if restricted else len(pool)
    if machines > len(pool):
        raise ConfigurationError(
            f"{settings.where('num_machines')}, but the hostfile lists {len(pool)}: {', '.join(pool)}."
        )
    kept = dict(list(pool.items())[:machines])
    if settings["num_processes"] is None:
        return kept
    local, rest = divmod(settings["num_processes"], machines)
    if rest:
        raise ConfigurationError(
            f"{settings.where('num_processes')} cannot be divided evenly over {machines} machines. Give a multiple of "
            f"{machines}."
        )
    for host, slots in kept.items():
        if local > len(slots):
            raise ConfigurationError(
                f"{settings.where('num_processes')}: {local} on each machine, but {host} has {len(slots)} slots."
            )
    return {host: slots[:local] for host, slots in kept.items()}
