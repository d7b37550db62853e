"""A SageMaker training job in plain values, the same for both generations of the SDK."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from ..plan import Plan

# What the SDK itself asks AWS with; they are no business of the container, which has a role.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION")


@dataclass(frozen=True)
class CloudJob:
    """What the SDK is given.

    Attributes:
        entry_point: name of the script in ``source_dir``.
        source_dir: folder that is sent, with its requirements.txt.
        hyperparameters: arguments of the script, by name.
        environment: variables of the container.
        data_parallel: whether each machine starts a process for each of its GPUs.
        inputs: S3 addresses, by channel.
        metrics: regular expressions, by name.
        further: settings of the SDK that are passed on.
    """

    entry_point: str
    source_dir: str
    instance_type: str
    instance_count: int
    role: str
    base_job_name: str
    image_uri: str | None
    versions: Mapping[str, str]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    data_parallel: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, str]] = ()
    further: Mapping[str, Any] = field(default_factory=dict)


def describe_job(plan: Plan) -> CloudJob:
    """The job that the settings ask for.

    Raises:
        ConfigurationError: the target is not a script, a setting is missing, or an argument of the script has no name
            or no value.
    """
    settings = plan.settings
    if plan.target.kind != "script":
        raise ConfigurationError(
            "SageMaker runs a Python script: leave -m and --no_python out, and give the path of a .py file."
        )
    for name in ("iam_role_name", "ec2_instance_type"):
        if not settings[name]:
            raise ConfigurationError(
                f"a SageMaker job needs {name}: give --{name}, or set it in the configuration file."
            )
    script = Path(plan.target.name)
    environment = {name: value for name, value in plan.environment.items() if name not in _CREDENTIALS}
    data_parallel = settings["distributed_type"] == "DATA_PARALLEL"
    if settings["distributed_type"] == "MODEL_PARALLEL":
        raise ConfigurationError(
            f"{settings.where('distributed_type')} is not supported on SageMaker. Allowed: NO, DATA_PARALLEL."
        )
    return CloudJob(
        entry_point=script.name,
        source_dir=str(script.parent),
        instance_type=settings["ec2_instance_type"],
        instance_count=settings["num_machines"],
        role=settings["iam_role_name"],
        base_job_name=settings["base_job_name"],
        image_uri=settings["image_uri"],
        versions={name: settings[name] for name in ("transformers_version", "pytorch_version", "py_version")},
        hyperparameters=to_hyperparameters(plan.target.args),
        environment={**environment, **_sagemaker_variables(data_parallel)},
        data_parallel=data_parallel,
        inputs={row["name"]: row["value"] for row in _read_table(settings["sagemaker_inputs_file"])},
        metrics=[
            {"Name": row["name"], "Regex": row["value"]} for row in _read_table(settings["sagemaker_metrics_file"])
        ],
        further=dict(settings["sagemaker_additional_args"] or {}),
    )


def credentials(plan: Plan) -> dict[str, str]:
    """Variables that the SDK finds its credentials and its region by."""
    settings = plan.settings
    given = {
        "AWS_PROFILE": settings["aws_profile"],
        "AWS_ACCESS_KEY_ID": settings["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": settings["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": settings["aws_region"],
    }
    if bool(given["AWS_ACCESS_KEY_ID"]) != bool(given["AWS_SECRET_ACCESS_KEY"]):
        raise ConfigurationError(
            "--aws_access_key_id and --aws_secret_access_key belong together: give both, or use a profile."
        )
    return {name: value for name, value in given.items() if value}


def to_hyperparameters(args: Sequence[str]) -> dict[str, Any]:
    """Arguments of a script as SageMaker takes them: names with values; it knows neither flags alone nor positional
    arguments.

    Raises:
        ConfigurationError: an argument is not of the form ``--name value`` or ``--name=value``, or comes twice.
    """
    found: dict[str, Any] = {}
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
                f"argument {name} of the script has no value. SageMaker knows no flags: declare a bool, and give "
                f"`{name} True`."
            )
        key = name.lstrip("-")
        if key in found:
            raise ConfigurationError(f"argument {name} of the script comes twice. SageMaker passes each name once.")
        found[key] = _typed(text)
    return found


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


def _sagemaker_variables(data_parallel: bool) -> dict[str, str]:
    return {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL" if data_parallel else "NO",
    }


def _read_table(path: str | None) -> Iterator[Mapping[str, str]]:
    """The rows of a tab-separated file below its heading, as name and value."""
    if path is None:
        return
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path!r} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}."
        ) from None
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if not line.strip():
            continue
        if len(cells) != 2 or not all(cell.strip() for cell in cells):
            raise ConfigurationError(
                f"{path}, line {number}: {line!r} is not a name and a value with a tab between them."
            )
        yield {"name": cells[0].strip(), "value": os.path.expandvars(cells[1].strip())}
