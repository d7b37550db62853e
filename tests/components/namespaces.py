"""Hosts on one machine: network namespaces with a name of their own, two with a cable (veth) between them, more with a
switch (a bridge in another namespace).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_LINES = "127.0.0.1 localhost\n{}"


def missing() -> str:
    """Why there can be no second host here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: scripts/components hosts"
    name = f"accel-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Hosts:
    """The hosts host0, host1 and so on, at 10.77.0.1, 10.77.0.2, ...; a context."""

    def __init__(self, count: int = 2) -> None:
        self.addresses = tuple(f"10.77.0.{index + 1}" for index in range(count))
        self.names = tuple(f"accel-{os.getpid()}-{index}" for index in range(count))
        self.cables = tuple(f"ac{os.getpid() % 10**6}v{index}" for index in range(count))
        self._switch = "" if count == 2 else f"accel-{os.getpid()}-switch"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in filter(None, (*self.names, self._switch)):
            _ip("netns", "add", name)
        if self._switch:
            self._make_switch()
        else:
            _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        known = "".join(f"{address} host{index}\n" for index, address in enumerate(self.addresses))
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for link in (cable, "lo"):
                _ip("-n", name, "link", "set", link, "up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(_LINES.format(known))
            # No name server can be reached from here, and each question to one would cost seconds.
            (folder / "nsswitch.conf").write_text("hosts: files\n")

    def _make_switch(self) -> None:
        inside = ("-n", self._switch)
        _ip(*inside, "link", "add", "switch", "type", "bridge")
        _ip(*inside, "link", "set", "switch", "up")
        for index, cable in enumerate(self.cables):
            plug = f"plug{index}"
            _ip("link", "add", cable, "type", "veth", "peer", "name", plug, "netns", self._switch)
            _ip(*inside, "link", "set", plug, "master", "switch", "up")

    def __exit__(self, *_: object) -> None:
        for name in filter(None, (*self.names, self._switch)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def set_cable(self, plugged: bool, host: int = 1) -> None:
        """Cut the cable at a host, or mend it."""
        _ip("-n", self.names[host], "link", "set", self.cables[host], "up" if plugged else "down")

    def command(self, host: int, words: list[str]) -> list[str]:
        """A command as it is run on one of the hosts."""
        script = f'hostname host{host}; exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "bash", "-c", script, "bash", *words]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
