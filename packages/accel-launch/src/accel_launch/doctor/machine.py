"""Checks of one machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import psutil

from accel_state.env import read_str
from accel_state.ports import reserved_port

from .result import Check, Finding, fail, ok, warn

if TYPE_CHECKING:
    import torch

GIB = 2**30
LEAST_OPEN_FILES = 1024
"""What most systems start with: enough for a rank with a few loader workers."""
ENOUGH_OPEN_FILES = 4096
LEAST_SHARED_MEMORY = 1 * GIB
LEAST_MEMORY = 1 * GIB
LEAST_TEMPORARY = 1 * GIB
OLDEST_TORCH = (2, 4)
_SHARED_MEMORY = "/dev/shm"
_PACKAGES = (
    "accel",
    "accel-launch",
    "accel-state",
    "accel-data",
    "deepspeed",
    "transformers",
    "bitsandbytes",
    "megatron-core",
)


def check_versions() -> Iterator[Finding]:
    """Python, torch and the packages that meet in a run."""
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    if importlib.util.find_spec("torch") is None:
        yield fail("torch", "not installed", "pip install torch")
        return
    version = importlib.metadata.version("torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        yield fail("torch", version, f"pip install -U 'torch>={'.'.join(map(str, OLDEST_TORCH))}'")
    else:
        yield ok("torch", version)
    found = [f"{name} {_version(name)}" for name in _PACKAGES if _version(name)]
    yield ok("packages", ", ".join(found))


def versions() -> dict[str, str]:
    """What must be the same on all machines of a run."""
    names = ("torch", "accel-state", "accel-launch", "accel", "deepspeed")
    return {"python": platform.python_version().rpartition(".")[0], **{name: _version(name) for name in names}}


def check_kernel() -> Iterator[Finding]:
    """A Linux kernel that processes have been seen to hang with."""
    from accel_state.hardware import check_os_kernel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_os_kernel()
    if caught:
        yield warn("system", platform.platform(), str(caught[0].message))
    else:
        yield ok("system", platform.platform())


def check_devices() -> Iterator[Finding]:
    """Devices that torch sees, against those that the machine has; a computation on each."""
    import torch

    from accel_state import devices

    from ..accelerators.registry import find_installed

    device = devices.detect()
    installed, makers = find_installed()
    count = device.device_count()
    if device.name == "cpu" and installed:
        advice = (
            "Install a torch that is built for them (https://pytorch.org/get-started), or see whether the driver "
            "works, or what a "
            "variable such as "
            f"{makers[0]} hides."
        )
        yield fail(
            "devices", f"the machine has {installed} accelerator(s), and torch {torch.__version__} sees none", advice
        )
        return
    text = f"{count} x {device.name}" if device.name != "cpu" else f"the CPU alone, {_cores()} core(s)"
    yield ok("devices", text)
    for index in range(count if device.name != "cpu" else 1):
        yield _compute(torch.device(device.name, index) if device.name != "cpu" else torch.device("cpu"))


def _compute(device: torch.device) -> Finding:
    import torch

    try:
        # Small integers: the product is exact in every arithmetic.
        left = torch.arange(64.0, device=device).reshape(8, 8) % 5
        right = (left @ left.T).cpu()
        exact = torch.equal(right, left.cpu() @ left.cpu().T)
    except RuntimeError as error:
        return fail(
            "computing",
            f"{device}: {str(error).splitlines()[0]}",
            "See whether another process holds it, and whether torch and driver fit.",
        )
    if not exact:
        return fail(
            "computing",
            f"{device} multiplies matrices wrongly",
            "Take the device out of service: its results cannot be trusted.",
        )
    return ok("computing", f"{device} multiplies matrices rightly")


def check_memory() -> Iterator[Finding]:
    """Main memory, shared memory, and room for temporary files."""
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < LEAST_MEMORY:
        yield fail(
            "memory", text, "End what takes it, or use a bigger machine: a process with torch alone takes 0.3 GiB."
        )
    else:
        yield ok("memory", text)
    if os.path.isdir(_SHARED_MEMORY):
        yield _room(
            "shared memory",
            _SHARED_MEMORY,
            LEAST_SHARED_MEMORY,
            "Loader workers pass batches there: docker run --shm-size=8g, or num_workers=0.",
        )
    import tempfile

    yield _room(
        "temporary", tempfile.gettempdir(), LEAST_TEMPORARY, "Make room there, or have TMPDIR name another folder."
    )


def _room(subject: str, folder: str, least: int, advice: str) -> Finding:
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f}"
    if not os.access(folder, os.W_OK):
        return fail(subject, f"{folder} cannot be written to", advice)
    return ok(subject, text) if usage.free >= least else fail(subject, text, advice)


def check_limits() -> Iterator[Finding]:
    """How many files a process may have open."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < ENOUGH_OPEN_FILES:
        reachable = (
            ""
            if hard < 0 or hard >= ENOUGH_OPEN_FILES
            else f" (this machine allows {hard}: its administrator can raise that)"
        )
        yield (fail if soft < LEAST_OPEN_FILES else warn)(
            "open files",
            f"at most {soft}",
            f"`ulimit -n {ENOUGH_OPEN_FILES}` before launching{reachable}: loader workers and ranks need many.",
        )
    else:
        yield ok("open files", f"at most {'any number' if soft < 0 else soft}")


def check_network() -> Iterator[Finding]:
    """The machine's own name, and a port."""
    name = socket.gethostname()
    with (
        reserved_port() as port,
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port), timeout=5) as client,
    ):
        connection, _ = server.accept()
        connection.sendall(b"accel")
        answer = client.recv(5)
        connection.close()
    if answer == b"accel":
        yield ok("ports", f"a free one was found and reached ({port})")
    else:
        yield fail(
            "ports",
            f"what was sent to port {port} of 127.0.0.1 did not arrive",
            "See what filters traffic on the loopback interface.",
        )
    advice = (
        "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that "
        "the machines share."
    )
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield warn("host name", f"{name} cannot be resolved: {error}", advice)
        return
    yield ok("host name", f"{name} is {', '.join(addresses)}")


def check_environment() -> Iterator[Finding]:
    """Variables that make a run other than it seems."""
    left = {name: value for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if (value := read_str(name)) is not None}
    if left:
        pairs = " ".join(f"{name}={value}" for name, value in left.items())
        yield warn(
            "variables",
            f"{pairs}: a process would take itself for a rank",
            f"Unless a launcher set them: unset {' '.join(left)}",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY") if read_str(name)]
    if proxies and not read_str("no_proxy"):
        yield warn(
            "variables",
            f"{proxies[0]} is set and no_proxy is not",
            "Add the machines of the run to no_proxy if downloads from them hang.",
        )


def check_configuration() -> Iterator[Finding]:
    """The configuration file that ``accel launch`` would read."""
    from accel_state.errors import AccelError
    from accel_state.options import find_default

    from ..config.read import load_settings

    path = find_default()
    try:
        load_settings()
    except AccelError as error:
        yield fail("configuration", str(error), "Correct that line, or run `accel config` to write a new file.")
        return
    yield ok("configuration", str(path) if path else "no file: the defaults count (`accel config` writes one)")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cores() -> int:
    from ..cpus import usable_cores

    return usable_cores()


CHECKS: Sequence[tuple[str, Check]] = (
    ("versions", check_versions),
    ("system", check_kernel),
    ("devices", check_devices),
    ("memory", check_memory),
    ("limits", check_limits),
    ("network", check_network),
    ("variables", check_environment),
    ("configuration", check_configuration),
)
