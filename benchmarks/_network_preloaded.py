"""A host of network_faults.py that has imported torch once, and forks its launchers: a run takes a tenth of the CPU.

Started by the program with the number of a socket, over which it is told what to launch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from _network_rows import STEP_SECONDS, STEPS
from _network_script import train

from accel_launch import notebook_launcher


def _launch(request: dict[str, Any], output: int) -> None:
    """What a forked launcher does: the agent and its ranks are those of ``accel launch``."""
    os.chdir(request["folder"])
    for number in (1, 2):
        os.dup2(output, number)
    notebook_launcher(
        train,
        (".", STEPS, STEP_SECONDS),
        num_processes=1,
        num_nodes=2,
        node_rank=request["host"],
        master_addr="10.77.0.1",
        use_port="29500",
        max_restarts=request["restarts"],
    )


def _fork(request: dict[str, Any], output: int) -> int:
    pid = os.fork()
    if pid:
        os.close(output)
        return pid
    code = 1
    try:
        _launch(request, output)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Start launchers, and tell how they ended."""
    with socket.socket(fileno=int(sys.argv[1])) as client:
        client.send(b"0")
        while True:
            text, files, _, _ = socket.recv_fds(client, 65536, 1)
            if not text:
                return
            request = json.loads(text)
            answer = _fork(request, files[0]) if files else _wait(request["pid"])
            client.send(str(answer).encode())


main()
