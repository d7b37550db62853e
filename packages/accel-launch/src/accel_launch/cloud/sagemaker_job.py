"""A SageMaker training job in plain values, for versions 2 and 3 of the SDK."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from ..hostfile import read_lines
from ..launch_plan import LaunchPlan

# Credentials of the SDK; the container has a role of its own.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION")


@dataclass(frozen=True)
class SageMakerJob:
    """Arguments for the SDK."""

    entry_point: str  # name of the script in ``source_dir``
    source_dir: str  # directory to upload, with its requirements.txt
    instance_type: str
    instance_count: int
    role: str
    base_job_name: str
    image_uri: str | None
    versions: Mapping[str, str]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # arguments of the script, by name
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of the container
    data_parallel: bool = False  # whether each machine starts one process per GPU
    inputs: Mapping[str, str] = field(default_factory=dict)  # S3 addresses, by channel
    metrics: Mapping[str, str] = field(default_factory=dict)  # regular expressions, by name
    sdk_options: Mapping[str, Any] = field(default_factory=dict)  # further settings of the SDK


def describe_job(plan: LaunchPlan) -> SageMakerJob:
    """Return the job that the settings ask for."""
    settings = plan.settings
    if plan.entrypoint.kind != "script":
        raise ConfigurationError(
            "SageMaker runs a Python script: leave -m and --no_python out, and give the path of a .py file."
        )
    for name in ("iam_role_name", "ec2_instance_type"):
        if not settings[name]:
            raise ConfigurationError(
                f"a SageMaker job needs {name}: give --{name}, or set it in the configuration file."
            )
    if settings["distributed_type"] == "MODEL_PARALLEL":
        raise ConfigurationError(
            f"{settings.where('distributed_type')} is not supported on SageMaker. Allowed: NO, DATA_PARALLEL."
        )
    data_parallel = settings["distributed_type"] == "DATA_PARALLEL"
    environment = {name: value for name, value in plan.environment.items() if name not in _CREDENTIALS}
    environment["ACCELERATE_USE_SAGEMAKER"] = "true"
    environment["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = "DATA_PARALLEL" if data_parallel else "NO"
    script = Path(plan.entrypoint.name)
    return SageMakerJob(
        entry_point=script.name,
        source_dir=str(script.parent),
        instance_type=settings["ec2_instance_type"],
        instance_count=settings["num_machines"],
        role=settings["iam_role_name"],
        base_job_name=settings["base_job_name"],
        image_uri=settings["image_uri"],
        versions={name: settings[name] for name in ("transformers_version", "pytorch_version", "py_version")},
        hyperparameters=to_hyperparameters(plan.entrypoint.args),
        environment=environment,
        data_parallel=data_parallel,
        inputs=_read_table(settings["sagemaker_inputs_file"]),
        metrics=_read_table(settings["sagemaker_metrics_file"]),
        sdk_options=dict(settings["sagemaker_additional_args"] or {}),
    )


def credentials(plan: LaunchPlan) -> dict[str, str]:
    """Environment variables with the credentials and the region of the SDK."""
    settings = plan.settings
    if bool(settings["aws_access_key_id"]) != bool(settings["aws_secret_access_key"]):
        raise ConfigurationError(
            "--aws_access_key_id and --aws_secret_access_key belong together: give both, or use a profile."
        )
    values = {
        "AWS_PROFILE": settings["aws_profile"],
        "AWS_ACCESS_KEY_ID": settings["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": settings["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": settings["aws_region"],
    }
    return {name: value for name, value in values.items() if value}


def to_hyperparameters(args: Sequence[str]) -> dict[str, Any]:
    """Script arguments as SageMaker passes them: name-value pairs, without flags and positional arguments."""
    hyperparameters: dict[str, Any] = {}
    words = iter(args)
    for word in words:
        name, sign, value = word.partition("=")
        text = value if sign else next(words, None)
        if not name.startswith("-") or not name.lstrip("-") or _is_number(name):
            raise ConfigurationError(
                f"argument {word!r} of the script has no name. SageMaker passes `--name value` pairs only."
            )
        if text is None or (not sign and text.startswith("-") and not _is_number(text)):
            raise ConfigurationError(
                f"argument {name} of the script has no value. SageMaker does not support flags: declare a bool, and "
                f"give `{name} True`."
            )
        key = name.lstrip("-")
        if key in hyperparameters:
            raise ConfigurationError(f"argument {name} of the script is repeated. SageMaker passes each name once.")
        hyperparameters[key] = _typed(text)
    return hyperparameters


def _typed(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) is not None


def _read_table(path: str | None) -> dict[str, str]:
    """Values by name, from the rows of a tab-separated file below its header."""
    table: dict[str, str] = {}
    for number, line in enumerate(read_lines(Path(path), repr(path))[1:] if path else (), 2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 2 or not all(cells):
            raise ConfigurationError(f"{path}, line {number}: {line!r} is not a name and a value separated by a tab.")
        table[cells[0]] = os.path.expandvars(cells[1])
    return table
