"""torchft's lighthouse, through which the replicas of ``accel launch --ft`` agree on who takes part in a step.

It listens on the loopback address, because it has no notion of a token. Launchers on other machines reach it through a
tunnel, which has. ``python -m accel_launch.lighthouse LAUNCHER_PID ADDRESS LIMIT...`` is its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

from accel_state import run_token
from accel_state.options import FaultToleranceOptions
from accel_state.ports import LOOPBACK, get_free_port, listening_host
from accel_state.tunnel import TunnelClient, TunnelServer

from .elastic.worker import die_with_launcher
from .entrypoint import python_command
from .network.replica_machines import ReplicaMachines

_TICK_MS = 20
# A lighthouse that ends at once is started again after this time.
_PAUSE_SECONDS = 1.0
_NAMED_UNKNOWN = 8


class Lighthouse:
    """The lighthouse of a run as this machine sees it: a process, or a tunnel to the one on machine rank 0.

    Args:
        options: time limits and numbers of replicas.
        token: of the run.
        host: the main address, of machine rank 0.
        machines: the other machines; None on a single one.
        serves: whether it is on this machine.
        log: whether to show its output.
        say: prints a note.
    """

    def __init__(
        self,
        options: FaultToleranceOptions,
        token: str,
        log: bool,
        say: Callable[[str], None],
        host: str = LOOPBACK,
        machines: ReplicaMachines | None = None,
        serves: bool = True,
    ) -> None:
        self._options, self._token, self._log, self._say = options, token.encode(), log, say
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._tunnel: TunnelServer | TunnelClient | None = None
        self._unknown_peers: set[str] = set()
        self._machines = machines
        if machines is not None and not serves:
            self._tunnel = TunnelClient(machines.wait_for_lighthouse(), self._token)
            self._port = self._tunnel.port
            return
        self._port = get_free_port()
        if machines is not None:
            self._tunnel = TunnelServer(listening_host(host), 0, self._port, self._token, self._note_unknown)
            machines.announce(self._tunnel.port)
        self._start()

    @property
    def address(self) -> str:
        """URL for the replicas of this machine."""
        return f"http://{LOOPBACK}:{self._port}"

    def _note_unknown(self, address: str) -> None:
        if address not in self._unknown_peers and len(self._unknown_peers) < _NAMED_UNKNOWN:
            self._unknown_peers.add(address)
            self._say(f"refused {address}, which does not have the token of this run ({run_token.VARIABLE})")

    def _start(self) -> None:
        options = self._options
        limits = (round(1000 * options.replica_timeout), _TICK_MS, round(1000 * options.heartbeat_timeout))
        numbers = map(str, (options.min_replicas, *limits))
        address = f"{LOOPBACK}:{self._port}"
        command = python_command("-m", "accel_launch.lighthouse", str(os.getpid()), address, *numbers)
        log = None if self._log else subprocess.DEVNULL
        self._began = time.monotonic()
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def restart_if_ended(self) -> int | None:
        """Start the process again if it has ended, and return its exit code (-N after signal N); None if it runs.

        On other machines, follow it to another port.
        """
        if self._machines is not None and isinstance(self._tunnel, TunnelClient):
            self._tunnel.address = self._tunnel.address[0], self._machines.lighthouse_port()
        code = None if self._process is None else self._process.poll()
        if code is None or time.monotonic() - self._began <= _PAUSE_SECONDS:
            return None
        self._start()
        return code

    def close(self) -> None:
        """End it."""
        if self._tunnel is not None:
            self._tunnel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def serve(argv: Sequence[str]) -> None:
    """Serve until the launcher ends."""
    launcher, address, *limits = argv
    die_with_launcher(int(launcher))
    # Importing the package would import torch, which takes seconds, and which this module of it does not need:
    # replicas that have lost the lighthouse wait for the new one.
    spec = find_spec("torchft")
    assert spec is not None
    package = types.ModuleType("torchft")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["torchft"] = package
    server = import_module("torchft.coordination").LighthouseServer(address, *map(int, limits))
    threading.Event().wait()
    server.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1:])
