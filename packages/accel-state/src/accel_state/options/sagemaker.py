"""Training jobs of Amazon SageMaker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .option import OptionGroup, option


@dataclass(frozen=True)
class SageMakerOptions(OptionGroup):
    """A SageMaker training job. Keys are for configuration files with ``compute_environment: AMAZON_SAGEMAKER``."""

    title: ClassVar[str] = "AWS"
    description: ClassVar[str] = "Used with compute_environment AMAZON_SAGEMAKER."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("compute_environment", "AMAZON_SAGEMAKER")

    aws_access_key_id: str | None = option(
        None,
        kind=str,
        env="AWS_ACCESS_KEY_ID",
        key=None,
        secret=True,
        metavar="ID",
        help="Access key; never stored in a file. A profile of AWS's own configuration is the better way.",
    )
    aws_secret_access_key: str | None = option(
        None,
        kind=str,
        env="AWS_SECRET_ACCESS_KEY",
        key=None,
        secret=True,
        metavar="KEY",
        help="Secret key; never stored in a file. On a command line other users of the machine can see it.",
    )
    profile: str | None = option(
        None,
        name="aws_profile",
        kind=str,
        env="AWS_PROFILE",
        key="profile",
        metavar="NAME",
        help="Profile of AWS's own configuration that holds the credentials.",
        question="Which profile of your AWS configuration holds the credentials (leave it empty for the default one)?",
    )
    region: str = option(
        "us-east-1",
        name="aws_region",
        kind=str,
        env="AWS_DEFAULT_REGION",
        key="region",
        metavar="REGION",
        help="AWS region of the job.",
        question="In which AWS region should the job run?",
    )
    iam_role_name: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_SAGEMAKER_IAM_ROLE_NAME",
        metavar="ROLE",
        help="IAM role, by name or ARN, that the job runs under.",
        question="Under which IAM role should the job run (its name or ARN)?",
    )
    ec2_instance_type: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_SAGEMAKER_EC2_INSTANCE_TYPE",
        metavar="TYPE",
        help="Kind of machine, such as ml.p3.2xlarge; local runs the container on this machine.",
        question="On which kind of machine should the job run?",
        suggested="ml.p3.2xlarge",
    )
    image_uri: str | None = option(
        None,
        kind=str,
        env="ACCELERATE_SAGEMAKER_IMAGE_URI",
        metavar="URI",
        help="Container image; left out, the one for the versions below.",
        question="Which container image should be used (leave it empty for the one of the versions asked next)?",
    )
    base_job_name: str = option(
        "accelerate-sagemaker-1",
        kind=str,
        env="ACCELERATE_SAGEMAKER_BASE_JOB_NAME",
        metavar="NAME",
        help="What the names of jobs begin with.",
        question="What should the names of jobs begin with?",
    )
    pytorch_version: str = option(
        "1.10.2",
        kind=str,
        env="ACCELERATE_SAGEMAKER_PYTORCH_VERSION",
        metavar="VERSION",
        help="torch in the container image.",
        question="Which version of torch should the container have?",
        asked_when={"image_uri": (None,)},
    )
    transformers_version: str = option(
        "4.17.0",
        kind=str,
        env="ACCELERATE_SAGEMAKER_TRANSFORMERS_VERSION",
        metavar="VERSION",
        help="transformers in the container image.",
        question="Which version of transformers should the container have?",
        asked_when={"image_uri": (None,)},
    )
    py_version: str = option(
        "py38",
        kind=str,
        env="ACCELERATE_SAGEMAKER_PY_VERSION",
        metavar="VERSION",
        help="Python in the container image, such as py38.",
        question="Which version of Python should the container have?",
        asked_when={"image_uri": (None,)},
    )
    inputs_file: str | None = option(
        None,
        name="sagemaker_inputs_file",
        kind=str,
        env="ACCELERATE_SAGEMAKER_INPUTS_FILE",
        metavar="FILE",
        help="Tab-separated file with a channel's name and its S3 address in each row, below a heading.",
        question="Path of a file that lists input channels (leave it empty for none)?",
    )
    metrics_file: str | None = option(
        None,
        name="sagemaker_metrics_file",
        kind=str,
        env="ACCELERATE_SAGEMAKER_METRICS_FILE",
        metavar="FILE",
        help="Tab-separated file with a metric's name and its regular expression in each row, below a heading.",
        question="Path of a file that lists metrics (leave it empty for none)?",
    )
    additional_args: dict[str, Any] | None = option(  # noqa: RUF009
        None,
        name="sagemaker_additional_args",
        kind=dict,
        env="ACCELERATE_SAGEMAKER_ADDITIONAL_ARGS",
        key="additional_args",
        metavar="JSON",
        help="Further settings of SageMaker's Estimator, such as use_spot_instances and max_wait.",
    )
