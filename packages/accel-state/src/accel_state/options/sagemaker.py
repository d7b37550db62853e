"""Training jobs on Amazon SageMaker."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .declaration import OptionGroup, option

_NO_IMAGE: dict[str, tuple[Any, ...]] = {"image_uri": (None,)}
_sagemaker = functools.partial(option, env_prefix="ACCELERATE_SAGEMAKER_")


@dataclass(frozen=True)
class SageMakerOptions(OptionGroup):
    """A SageMaker training job. The keys are those of files with ``compute_environment: AMAZON_SAGEMAKER``."""

    title = "AWS"
    description = "Used with compute_environment AMAZON_SAGEMAKER."
    enabled_by = ("compute_environment", "AMAZON_SAGEMAKER")

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
    pytorch_version: str = _sagemaker(
        "1.10.2",
        metavar="VERSION",
        help="PyTorch version of the container image.",
        question="Which PyTorch version should the container have?",
        asked_when=_NO_IMAGE,
    )
    transformers_version: str = _sagemaker(
        "4.17.0",
        metavar="VERSION",
        help="Transformers version of the container image.",
        question="Which Transformers version should the container have?",
        asked_when=_NO_IMAGE,
    )
    py_version: str = _sagemaker(
        "py38",
        metavar="VERSION",
        help="Python version of the container image, such as py38.",
        question="Which Python version should the container have?",
        asked_when=_NO_IMAGE,
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
