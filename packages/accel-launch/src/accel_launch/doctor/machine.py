"""Checks of one machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import psutil

from accel_state.env import read_str
from accel_state.errors import MissingDependencyError
from accel_state.ports import reserved_port
from accel_state.torchft_version import torchft_version

from ..remedies import HOST_NAME
from .result import Check, CheckResult, fail, ok, warn

if TYPE_CHECKING:
    import torch

GIB = 2**30
MIN_OPEN_FILES = 1024
"""The default of most systems: enough for a rank with a few loader workers."""
RECOMMENDED_OPEN_FILES = 4096
MIN_SHARED_MEMORY = 1 * GIB
MIN_MEMORY = 1 * GIB
MIN_TEMPORARY = 1 * GIB
MIN_TORCH = (2, 6)
_SHARED_MEMORY = "/dev/shm"
_PACKAGES = (
    *("accel", "accel-launch", "accel-state", "accel-data"),
    *("deepspeed", "transformers", "bitsandbytes", "megatron-core"),
)


def check_versions() -> Iterator[CheckResult]:
    """Python, torch and related packages."""
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    if importlib.util.find_spec("torch") is None:
        yield fail("torch", "not installed", "pip install torch")
        return
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_TORCH:
        yield fail("torch", version, f"pip install -U 'torch>={'.'.join(map(str, MIN_TORCH))}'")
    else:
        yield ok("torch", version)
    if importlib.util.find_spec("megatron") is not None and _version("megatron-core"):
        yield _megatron_kernels()
    yield ok("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES if _version(name)))


def _megatron_kernels() -> CheckResult:
    """Return the optional kernels of Megatron-core, and what is slower without them."""
    optional = {
        "transformer_engine": "fused layers, 8-bit floating point, and overlapped tensor parallelism",
        "apex": "fused Adam and accumulation of gradients in the matrix products",
    }
    missing = [f"{name} ({effect})" for name, effect in optional.items() if importlib.util.find_spec(name) is None]
    text = f"megatron-core {_version('megatron-core')}"
    if missing:
        text += f", without the optional {' and '.join(missing)}: torch's own kernels are used, which are slower"
    return ok("megatron", text)


def versions() -> dict[str, str]:
    """Versions that must be the same on all machines of a run."""
    names = ("torch", "accel-state", "accel-launch", "accel", "deepspeed")
    return {"python": platform.python_version().rpartition(".")[0], **{name: _version(name) for name in names}}


def check_kernel() -> Iterator[CheckResult]:
    """Linux kernels that are known to hang processes."""
    from accel_state.device_checks import check_os_kernel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_os_kernel()
    if caught:
        yield warn("system", platform.platform(), str(caught[0].message))
    else:
        yield ok("system", platform.platform())


def check_devices() -> Iterator[CheckResult]:
    """Check that torch sees the devices of the machine, and computes correctly on each."""
    import torch

    from accel_state import devices

    from ..accelerators.registry import find_installed
    from ..cpus import usable_cores

    device = devices.detect()
    installed, variables = find_installed()
    if device.name == "cpu" and installed:
        text = f"the machine has {installed} accelerator(s), but torch {torch.__version__} sees none"
        advice = (
            "Install a build of torch for them (https://pytorch.org/get-started), check the driver, or check whether "
            f"{variables[0]} hides them."
        )
        yield fail("devices", text, advice)
    elif device.name == "cpu":
        yield ok("devices", f"CPU only, {usable_cores()} core(s)")
        yield _compute(torch.device("cpu"))
    else:
        yield ok("devices", f"{device.device_count()} x {device.name}")
        for index in range(device.device_count()):
            yield _compute(torch.device(device.name, index))


def _compute(device: torch.device) -> CheckResult:
    import torch

    try:
        # Small integers: the product is exact in every precision.
        matrix = torch.arange(64.0, device=device).reshape(8, 8) % 5
        exact = torch.equal((matrix @ matrix.T).cpu(), matrix.cpu() @ matrix.cpu().T)
    except RuntimeError as error:
        advice = "Check whether another process holds it, and whether torch supports the driver's version."
        return fail("computing", f"{device}: {str(error).splitlines()[0]}", advice)
    if not exact:
        advice = "Take the device out of service: its results are unreliable."
        return fail("computing", f"{device} computes wrong matrix products", advice)
    return ok("computing", f"{device} computes correct matrix products")


def check_memory() -> Iterator[CheckResult]:
    """Yield the main memory, shared memory, and space for temporary files."""
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < MIN_MEMORY:
        yield fail("memory", text, "End other programs, or use a bigger machine: a process with torch needs 0.3 GiB.")
    else:
        yield ok("memory", text)
    if os.path.isdir(_SHARED_MEMORY):
        advice = "Loader workers pass batches through it: use docker run --shm-size=8g, or num_workers=0."
        yield _space("shared memory", _SHARED_MEMORY, MIN_SHARED_MEMORY, advice)
    advice = "Free some space, or set TMPDIR to another directory."
    yield _space("temporary", tempfile.gettempdir(), MIN_TEMPORARY, advice)


def _space(subject: str, directory: str, minimum: int, advice: str) -> CheckResult:
    usage = shutil.disk_usage(directory)
    if not os.access(directory, os.W_OK):
        return fail(subject, f"{directory} is not writable", advice)
    text = f"{directory}: {usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f}"
    return ok(subject, text) if usage.free >= minimum else fail(subject, text, advice)


def check_limits() -> Iterator[CheckResult]:
    """Yield how many files a process may open."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= soft < RECOMMENDED_OPEN_FILES:
        yield ok("open files", "no limit" if soft < 0 else f"at most {soft}")
        return
    advice = f"Run `ulimit -n {RECOMMENDED_OPEN_FILES}` before launching: loader workers and ranks open many files."
    if 0 <= hard < RECOMMENDED_OPEN_FILES:
        advice += f" This machine allows {hard}; its administrator can raise that."
    yield (fail if soft < MIN_OPEN_FILES else warn)("open files", f"at most {soft}", advice)


def check_network() -> Iterator[CheckResult]:
    """Yield the loopback interface, and the machine's own name."""
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
        yield ok("ports", f"connected to a free one ({port})")
    else:
        text = f"data sent to port {port} of 127.0.0.1 did not arrive"
        yield fail("ports", text, "Check what filters traffic on the loopback interface.")
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield warn("host name", f"{name} cannot be resolved: {error}", HOST_NAME)
        return
    yield ok("host name", f"{name} is {', '.join(addresses)}")


def check_environment() -> Iterator[CheckResult]:
    """Environment variables with unexpected effects."""
    ranks = {name: value for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if (value := read_str(name)) is not None}
    if ranks:
        text = f"{' '.join(f'{name}={value}' for name, value in ranks.items())} set: scripts would run as this rank"
        yield warn("variables", text, f"Unless a launcher set them, run: unset {' '.join(ranks)}")
    proxies = [name for name in ("http_proxy", "HTTP_PROXY") if read_str(name)]
    if proxies and not read_str("no_proxy"):
        advice = "If downloads from machines of the run hang, add the machines to no_proxy."
        yield warn("variables", f"{proxies[0]} is set and no_proxy is not", advice)


def check_configuration() -> Iterator[CheckResult]:
    """Yield the configuration file that ``accel launch`` would read."""
    from accel_state.errors import AccelError
    from accel_state.options import find_default

    from ..config.read import load_settings

    path = find_default()
    try:
        load_settings()
    except AccelError as error:
        yield fail("configuration", str(error), "Correct that line, or run `accel config` to write a new file.")
        return
    yield ok("configuration", str(path) if path else "no file, defaults are used (`accel config` writes one)")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_torchft() -> Iterator[CheckResult]:
    """Check that replicas of --ft can be started on this machine."""
    try:
        yield ok("torchft", torchft_version("--ft"))
    except MissingDependencyError as error:
        yield fail("torchft", str(error), "do so on every machine")


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
