"""The machines and slots that DeepSpeed's launcher would use: its hostfile, less what its filters leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.options import Resolution

from .hostfile import read_hostfile

DEFAULT_HOSTFILE = "/job/hostfile"

Pool = Mapping[str, tuple[int, ...]]
"""Slots (indices of devices) by host, in the order of the ranks."""


def read_pool(settings: Resolution) -> Pool:
    """The machines and slots of a run.

    Raises:
        ConfigurationError: there is no hostfile, it gives no slots, or a filter names what it does not hold.
    """
    path = settings["deepspeed_hostfile"] or DEFAULT_HOSTFILE
    if not settings["deepspeed_hostfile"] and not Path(path).is_file():
        raise ConfigurationError(
            f"DeepSpeed's launchers for several machines need a hostfile ({settings.where('num_machines')}). Give one "
            "with "
            "--deepspeed_hostfile, "
            "with a line such as `worker-0 slots=8` for each machine, or use --deepspeed_multinode_launcher standard."
        )
    pool: dict[str, tuple[int, ...]] = {}
    for host in read_hostfile(path, settings.where("deepspeed_hostfile")):
        if host.slots is None:
            raise ConfigurationError(
                f"{path}: {host.name} has no slots. DeepSpeed needs `{host.name} slots=N`, N being its devices."
            )
        pool[host.name] = tuple(range(host.slots))
    return _cut(settings, _filter(settings, pool))


def _filter(settings: Resolution, pool: Pool) -> Pool:
    included, excluded = settings["deepspeed_inclusion_filter"], settings["deepspeed_exclusion_filter"]
    if included:
        named = dict(_parse(included, settings.where("deepspeed_inclusion_filter"), pool))
        return {
            host: tuple(slot for slot in slots if slot in named[host]) for host, slots in pool.items() if host in named
        }
    if excluded:
        named = dict(_parse(excluded, settings.where("deepspeed_exclusion_filter"), pool))
        left = {host: tuple(slot for slot in slots if slot not in named.get(host, ())) for host, slots in pool.items()}
        if not any(left.values()):
            raise ConfigurationError(f"{settings.where('deepspeed_exclusion_filter')} leaves no slot. Exclude less.")
        return {host: slots for host, slots in left.items() if slots}
    return pool


def _parse(text: str, where: str, pool: Pool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``worker-0@worker-1:0,2``: every slot of worker-0, two of worker-1."""
    for part in text.split("@"):
        host, _, listed = part.strip().partition(":")
        if host not in pool:
            raise ConfigurationError(f"{where}: {host!r} is not in the hostfile. There are: {', '.join(pool)}.")
        try:
            slots = tuple(int(word) for word in listed.split(",")) if listed else pool[host]
        except ValueError:
            raise ConfigurationError(
                f"{where}: {part!r} is not HOST or HOST:SLOT,SLOT,... such as worker-1:0,2."
            ) from None
        if unknown := sorted(set(slots) - set(pool[host])):
            raise ConfigurationError(
                f"{where}: {host} has no slot {unknown[0]}. It has {', '.join(map(str, pool[host]))}."
            )
        yield host, slots


def _cut(settings: Resolution, pool: Pool) -> Pool:
    """The first ``num_machines`` machines, and of each as many slots as make ``num_processes``."""
    if settings["deepspeed_inclusion_filter"] or settings["deepspeed_exclusion_filter"]:
        _check_total(settings, pool)
        return pool
    machines = (
        settings["num_machines"] if settings.is_set("num_machines") and settings["num_machines"] > 1 else len(pool)
    )
    if machines > len(pool):
        raise ConfigurationError(
            f"{settings.where('num_machines')}, but the hostfile lists {len(pool)}: {', '.join(pool)}."
        )
    kept = dict(list(pool.items())[:machines])
    processes = settings["num_processes"]
    if processes is None:
        return kept
    if processes % machines:
        raise ConfigurationError(
            f"{settings.where('num_processes')} cannot be divided evenly over {machines} machines. Give a multiple of "
            "it."
        )
    local = processes // machines
    for host, slots in kept.items():
        if local > len(slots):
            raise ConfigurationError(
                f"{settings.where('num_processes')}: {local} on each machine, but {host} has {len(slots)} slots."
            )
    return {host: slots[:local] for host, slots in kept.items()}


def _check_total(settings: Resolution, pool: Pool) -> None:
    total = sum(map(len, pool.values()))
    if settings["num_processes"] not in (None, total):
        raise ConfigurationError(
            f"{settings.where('num_processes')}, but the filters leave {total} slots. Leave num_processes out, or "
            f"give {total}."
        )
