"""A cable with delay and loss between two network namespaces, for kernels without netem: a pair of TAP devices.

    _slow_cable.py NAMESPACE0 NAMESPACE1 ADDRESS0 ADDRESS1 DELAY_MS LOSS_PERCENT SEED

Prints "up" when the devices exist; ends with SIGTERM.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

_TUNSETIFF, _TAP, _WITHOUT_HEADER = 0x400454CA, 0x2, 0x1000


def _device(name: str, namespace: str, address: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _WITHOUT_HEADER))
    for words in (
        f"link set {name} netns {namespace}",
        f"-n {namespace} addr add {address}/24 dev {name}",
        f"-n {namespace} link set {name} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def main() -> None:
    """Pass packets on until a signal."""
    namespaces, addresses = sys.argv[1:3], sys.argv[3:5]
    delay, loss, draws = float(sys.argv[5]) / 1000, float(sys.argv[6]) / 100, random.Random(int(sys.argv[7]))
    # Names of this process's own: the devices are made in one namespace, where another run may make its own.
    devices = [_device(f"slow{os.getpid() % 10**6}v{end}", namespaces[end], addresses[end]) for end in (0, 1)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    waiting: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=time.monotonic() + 0.2)
        ready, _, _ = select.select(devices, [], [], max(0.0, due - time.monotonic()))
        for end in (0, 1):
            if devices[end] in ready:
                packet = os.read(devices[end], 65600)
                if draws.random() >= loss:
                    waiting[end].append((time.monotonic() + delay, packet))
            while waiting[end] and waiting[end][0][0] <= time.monotonic():
                os.write(devices[1 - end], waiting[end].popleft()[1])


main()
