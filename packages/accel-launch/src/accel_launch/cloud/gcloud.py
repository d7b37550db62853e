"""Runs shell commands on the machines of a TPU pod with Google's ``gcloud``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from accel_state.errors import ConfigurationError


def ssh_commands(
    name: str | None, zone: str | None, command: str, machines: Sequence[str] = (), alpha: bool = False
) -> list[list[str]]:
    """Return the gcloud commands that run a shell command on every machine of a pod."""
    required = {"--tpu_zone": zone} if machines else {"--tpu_name": name, "--tpu_zone": zone}
    missing = [flag for flag, value in required.items() if not value]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} must be given, on the command line or in the configuration file (tpu_name, "
            "tpu_zone)."
        )
    gcloud = ["gcloud", *(["alpha"] if alpha else []), "compute"]
    options = ["--zone", str(zone), "--command", command]
    if machines:
        return [[*gcloud, "ssh", machine, *options] for machine in machines]
    return [[*gcloud, "tpus", "tpu-vm", "ssh", str(name), *options, "--worker", "all"]]


def run_all(commands: Sequence[Sequence[str]]) -> int:
    """Run commands in parallel, and return the first exit code other than 0, else 0."""
    if shutil.which("gcloud") is None:
        raise ConfigurationError(
            "gcloud is not on PATH: install the Google Cloud SDK (https://cloud.google.com/sdk), then run `gcloud "
            "init`."
        )
    processes = [subprocess.Popen(command) for command in commands]
    try:
        codes = [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    return next((code for code in codes if code), 0)
