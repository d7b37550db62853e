"""What somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What other launchers call so.
_ELSEWHERE = {
    "--fp16": "--mixed_precision fp16",
    "--bf16": "--mixed_precision bf16",
    "--nproc_per_node": "--num_processes (which counts those of all machines)",
    "--nproc-per-node": "--num_processes (which counts those of all machines)",
    "--nnodes": "--num_machines",
    "--node_rank": "--machine_rank",
    "--node-rank": "--machine_rank",
    "--master_addr": "--main_process_ip",
    "--master-addr": "--main_process_ip",
    "--master_port": "--main_process_port",
    "--master-port": "--main_process_port",
}


def suggest(name: str, known: Sequence[str]) -> str:
    """A question that offers the known name that is close, if there is one."""
    if name in _ELSEWHERE:
        return f" Did you mean {_ELSEWHERE[name]}?"
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
