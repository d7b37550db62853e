"""What to do about errors of ranks and of the network: one table for the launcher and ``accel doctor``. Torch-free."""

from __future__ import annotations

import re

NETWORK = (
    "Allow traffic between the machines on all ports, and set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) to "
    "their common network interface."
)
HOST_NAME = (
    "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface that the "
    "machines share."
)
SIZE_MISMATCH = (
    "gloo aborts if the tensors of a collective have different sizes on different ranks: `accel launch --debug` names "
    "the call, and pad_across_processes makes the sizes equal."
)
NO_DEVICE = (
    "The script uses .cuda() or a device by name, and this run is on the CPU or another device. Remove it: prepare() "
    "moves models, batches arrive on accelerator.device, and other tensors take device=accelerator.device."
)
TWO_DEVICES = (
    "Models that were not prepared, and tensors that the script makes itself, are on the CPU unless they get "
    "device=accelerator.device; a device by name is the same for all ranks."
)

# Errors of a script's own connections, such as downloads, have other remedies.
_COLLECTIVES = r"(?is)(gloo|nccl|tcpstore|c10d|distnetworkerror).*"
# What occurs in an error, and the remedy; the first that matches.
_TABLE = (
    (r"\bSIGKILL\b", "Usually the system ran out of memory (see `dmesg`), or a user or scheduler killed it."),
    (r"\bSIGSEGV\b", "It crashed in native code; set PYTHONFAULTHANDLER=1 to see where."),
    (
        r"\bSIGBUS\b",
        "Often /dev/shm is full, which data loader workers use for batches: enlarge it, or use fewer workers.",
    ),
    (r"\bSIGABRT\b", "Native code aborted; see its output above, or set PYTHONFAULTHANDLER=1 to see where."),
    (r"match expected size", SIZE_MISMATCH),
    (r"remote=\[(127\.|::1)", HOST_NAME),
    (_COLLECTIVES + r"(Name or service not known|name resolution|resolve hostname)", HOST_NAME),
    (
        r"did not meet at|no lighthouse listens",
        "Start the same command on every machine, and check that each can reach the main address and port.",
    ),
    (r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver", NO_DEVICE),
    (r"Expected all tensors to be on the same device", TWO_DEVICES),
    (r"connectFullMesh failed", NETWORK),
    (_COLLECTIVES + r"(No route to host|unreachable|Connection timed out|unhandled system error)", NETWORK),
    (_COLLECTIVES + r"address already in use", "Another program has the port: give another --main_process_port."),
)


def remedy(error: str) -> str:
    """Return what to do about an error message or a signal's name; empty if the table has nothing."""
    return next((text for pattern, text in _TABLE if re.search(pattern, error)), "")
