"""TPU pods and training jobs on Amazon SageMaker."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from .declaration import OptionGroup, option

_TPU = {"distributed_type": ("XLA",)}
_POD = {**_TPU, "tpu_cluster": (True,)}


@dataclass(frozen=True)
class TpuOptions(OptionGroup):
    """TPUs."""

    title = "TPU"
    description = "Used with --tpu, and by accel tpu-config."
    used_with: ClassVar[tuple[str, Any] | None] = ("tpu", True)

    main_training_function: str = option(
        "main",
        metavar="NAME",
        help="Function of the script that each process runs; TPUs only.",
        question="What is the name of the function in your script that every process should run?",
        asked_when=_TPU,
    )
    downcast_bf16: bool = option(
        False,
        exported=True,
        help="With bf16 on TPUs: float64 tensors become float32, and float32 tensors become bfloat16.",
        question="Should bf16 on TPUs cast float32 to bfloat16 and float64 to float32?",
        asked_when={**_TPU, "mixed_precision": ("bf16",)},
    )
    tpu_cluster: bool = option(
        False,
        undo="no_tpu_cluster",
        key="tpu_use_cluster",
        other_keys=("tpu_cluster",),
        help="Start the script on every machine of a TPU pod.",
        question="Are you using a TPU pod?",
        asked_when=_TPU,
    )
    tpu_use_sudo: bool = option(
        False,
        help="Run the script with sudo on every machine of a TPU pod.",
        question="Must commands run with sudo on the machines of the pod?",
        asked_when=_POD,
    )
    vm: tuple[str, ...] = option(
        (),
        env="ACCELERATE_TPU_VM",
        key="tpu_vm",
        metavar="NAME",
        help="Name of one machine of a TPU pod; can be given several times. Left out, all machines.",
    )
    env: tuple[str, ...] = option(
        (),
        env="ACCELERATE_TPU_ENV",
        key="tpu_env",
        metavar="KEY=VALUE",
        help="Environment variable to set on the machines of a TPU pod; can be given several times.",
    )
    tpu_name: str | None = option(
        metavar="NAME",
        help="Name of the TPU in Google Cloud.",
        question="What is the name of your TPU?",
        asked_when=_POD,
    )
    tpu_zone: str | None = option(
        metavar="ZONE", help="Google Cloud zone of the TPU.", question="In which zone is your TPU?", asked_when=_POD
    )
    command_file: str | None = option(
        env="ACCELERATE_TPU_COMMAND_FILE",
        metavar="FILE",
        help="File of commands, one per line, that accel tpu-config runs on the machines of the pod.",
        question="Path of a file with commands to run on every machine of the pod (leave it empty for none)?",
        asked_when=_POD,
    )
    commands: tuple[str, ...] = option(
        (),
        name="command",
        env="ACCELERATE_TPU_COMMANDS",
        key="commands",
        metavar="COMMAND",
        help="Command that accel tpu-config runs on the machines of the pod; can be given several times.",
    )


_NO_IMAGE: dict[str, tuple[Any, ...]] = {"image_uri": (None,)}
_sagemaker = functools.partial(option, env_prefix="ACCELERATE_SAGEMAKER_")
_version = functools.partial(_sagemaker, metavar="VERSION", asked_when=_NO_IMAGE)


@dataclass(frozen=True)
class SageMakerOptions(OptionGroup):
    """A SageMaker training job. The keys are those of files with ``compute_environment: AMAZON_SAGEMAKER``."""

    title = "AWS"
    description = "Used with compute_environment AMAZON_SAGEMAKER."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("compute_environment", "AMAZON_SAGEMAKER")

    aws_access_key_id: str | None = option(
        env="AWS_ACCESS_KEY_ID",
        key=None,
        secret=True,
        metavar="ID",
        help="AWS access key id; never stored in a file. Prefer a profile of the AWS configuration.",
    )
    aws_secret_access_key: str | None = option(
        env="AWS_SECRET_ACCESS_KEY",
        key=None,
        secret=True,
        metavar="KEY",
        help="AWS secret access key; never stored in a file. Other users of the machine can see a command line.",
    )
    profile: str | None = option(
        name="aws_profile",
        env="AWS_PROFILE",
        key="profile",
        metavar="NAME",
        help="Profile of the AWS configuration that holds the credentials.",
        question="Which profile of your AWS configuration holds the credentials (leave it empty for the default one)?",
    )
    region: str = option(
        "us-east-1",
        name="aws_region",
        env="AWS_DEFAULT_REGION",
        key="region",
        metavar="REGION",
        help="AWS region of the job.",
        question="In which AWS region should the job run?",
    )
    iam_role_name: str | None = _sagemaker(
        metavar="ROLE",
        help="IAM role of the job, by name or ARN.",
        question="Which IAM role should the job run under (its name or ARN)?",
    )
    ec2_instance_type: str | None = _sagemaker(
        metavar="TYPE",
        help="EC2 instance type, such as ml.p3.2xlarge; local runs the container on this machine.",
        question="On which EC2 instance type should the job run?",
        suggested="ml.p3.2xlarge",
    )
    image_uri: str | None = _sagemaker(
        metavar="URI",
        help="Container image. Left out, the image with the versions below.",
        question="Which container image should be used (leave it empty to choose versions instead)?",
    )
    base_job_name: str = _sagemaker(
        "accelerate-sagemaker-1",
        metavar="NAME",
        help="Prefix of the names of jobs.",
        question="What should be the prefix of job names?",
    )
    pytorch_version: str = _version(
        "2.8.0",
        help="PyTorch version of the container image.",
        question="Which PyTorch version should the container have?",
    )
    transformers_version: str = _version(
        "4.56.2",
        help="Transformers version of the container image.",
        question="Which Transformers version should the container have?",
    )
    py_version: str = _version(
        "py312",
        help="Python version of the container image, such as py312.",
        question="Which Python version should the container have?",
    )
    inputs_file: str | None = _sagemaker(
        name="sagemaker_inputs_file",
        metavar="FILE",
        help="Tab-separated file of input channels, with a header row; each row has a channel's name and its S3 URI.",
        question="Path of a file that lists input channels (leave it empty for none)?",
    )
    metrics_file: str | None = _sagemaker(
        name="sagemaker_metrics_file",
        metavar="FILE",
        help="Tab-separated file of metrics, with a header row; each row has a metric's name and a regular expression.",
        question="Path of a file that lists metrics (leave it empty for none)?",
    )
    additional_args: dict[str, Any] | None = _sagemaker(  # noqa: RUF009
        name="sagemaker_additional_args",
        key="additional_args",
        help="Additional arguments of the SageMaker Estimator, such as use_spot_instances and max_wait.",
    )
