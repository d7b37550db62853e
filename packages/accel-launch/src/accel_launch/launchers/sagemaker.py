"""A training job on Amazon SageMaker: through the Hugging Face estimator of SDK 2, or the ModelTrainer of SDK 3."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError, require

from ..cloud.sagemaker_job import CloudJob, credentials, describe_job
from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher, Start

_INSTALL = "sagemaker"
# What the estimator of SDK 2 calls what SDK 3 has in objects of its own.
_COMPUTE = {
    "use_spot_instances": "enable_managed_spot_training",
    "volume_size": "volume_size_in_gb",
    "volume_kms_key": "volume_kms_key_id",
    "keep_alive_period_in_seconds": "keep_alive_period_in_seconds",
}
_STOPPING = {"max_run": "max_runtime_in_seconds", "max_wait": "max_wait_time_in_seconds"}
_NETWORKING = {
    "enable_network_isolation": "enable_network_isolation",
    "encrypt_inter_container_traffic": "enable_inter_container_traffic_encryption",
    "subnets": "subnets",
    "security_group_ids": "security_group_ids",
}


class SageMakerLauncher(Launcher):
    """Sends the script to SageMaker, and shows the log of the job until it ends."""

    def accepts(self, plan: Plan) -> bool:
        """The compute environment is SageMaker."""
        return plan.kind is Kind.SAGEMAKER

    def run(self, plan: Plan) -> int:
        """Start the job, and wait for it."""
        job = describe_job(plan)
        require("sagemaker", purpose="starting a SageMaker training job", install=_INSTALL)
        region = plan.settings["aws_region"]
        with patch_environment(**credentials(plan)):
            print(
                f"Starting a SageMaker job of {job.instance_count} x {job.instance_type} in {region} ...",
                flush=True,
            )
            model_data = submit(job, region)
        print(f"You can find your model data at: {model_data}")
        return 0

    def starts(self, plan: Plan) -> Sequence[Start]:
        """What the job's machines run."""
        job = describe_job(plan)
        words = [word for name, value in job.hyperparameters.items() for word in (f"--{name}", str(value))]
        machine = f"{job.instance_count} x {job.instance_type} of SageMaker, in {plan.settings['aws_region']}"
        what = job.image_uri or ", ".join(f"{name} {value}" for name, value in job.versions.items())
        notes = [
            f"role {job.role}; jobs are called {job.base_job_name}-...",
            f"container: {what}",
            f"sent: the folder {job.source_dir}",
        ]
        notes += [f"input channel {name}: {address}" for name, address in job.inputs.items()]
        notes += [f"{name}: {value}" for name, value in job.further.items()]
        notes += ["one process for each GPU of every machine"] if job.data_parallel else []
        return [Start(machine, ["python", job.entry_point, *words], job.environment, notes=notes)]


def submit(job: CloudJob, region: str, session: Any = None) -> str:
    """Start the job with the SDK that is installed, and wait for it.

    Args:
        region: of AWS.
        session: of the SDK; left out, it makes one.

    Returns:
        Where the model is.
    """
    # SDK 3 is several distributions: this package is of the one that trains.
    if importlib.util.find_spec("sagemaker.train") is not None:
        return _submit_trainer(job, region, session)
    return _submit_estimator(job, session)


def _submit_estimator(job: CloudJob, session: Any) -> str:
    from sagemaker.huggingface import HuggingFace

    estimator = HuggingFace(
        entry_point=job.entry_point,
        source_dir=job.source_dir,
        role=job.role,
        image_uri=job.image_uri,
        base_job_name=job.base_job_name,
        instance_count=job.instance_count,
        instance_type=job.instance_type,
        hyperparameters=dict(job.hyperparameters),
        environment=dict(job.environment),
        metric_definitions=list(job.metrics) or None,
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}} if job.data_parallel else None,
        debugger_hook_config=False,
        sagemaker_session=session,
        # With an image of one's own the versions say nothing, but the SDK asks for one of them.
        **({"py_version": job.versions["py_version"]} if job.image_uri else job.versions),
        **job.further,
    )
    estimator.fit(inputs=dict(job.inputs) or None)
    return str(estimator.model_data)


def _submit_trainer(job: CloudJob, region: str, session: Any) -> str:
    from sagemaker.train import ModelTrainer
    from sagemaker.train.configs import Compute, InputData, Networking, SourceCode, StoppingCondition
    from sagemaker.train.distributed import Torchrun

    compute, stopping, networking = (_pick(job.further, names) for names in (_COMPUTE, _STOPPING, _NETWORKING))
    unknown = sorted(set(job.further) - {*_COMPUTE, *_STOPPING, *_NETWORKING})
    if unknown:
        known = ", ".join(sorted({*_COMPUTE, *_STOPPING, *_NETWORKING}))
        raise ConfigurationError(
            f"additional_args: {', '.join(unknown)} means nothing to SDK 3 of SageMaker. Allowed: {known}; or install "
            "'sagemaker<3'."
        )
    requirements = "requirements.txt" if os.path.isfile(os.path.join(job.source_dir, "requirements.txt")) else None
    trainer = ModelTrainer(
        sagemaker_session=session,
        training_image=job.image_uri or _image_of(job, region),
        source_code=SourceCode(source_dir=job.source_dir, entry_script=job.entry_point, requirements=requirements),
        compute=Compute(instance_type=job.instance_type, instance_count=job.instance_count, **compute),
        stopping_condition=StoppingCondition(**stopping) if stopping else None,
        networking=Networking(**networking) if networking else None,
        distributed=Torchrun() if job.data_parallel else None,
        role=job.role,
        base_job_name=job.base_job_name,
        hyperparameters=dict(job.hyperparameters),
        environment=dict(job.environment),
        input_data_config=[InputData(channel_name=name, data_source=address) for name, address in job.inputs.items()]
        or None,
    )
    if job.metrics:
        trainer.with_metric_definitions(_metric_definitions(job))
    trainer.train()
    return str(trainer._latest_training_job.model_artifacts.s3_model_artifacts)


def _metric_definitions(job: CloudJob) -> list[Any]:
    from sagemaker.train.configs import MetricDefinition

    return [MetricDefinition(name=metric["Name"], regex=metric["Regex"]) for metric in job.metrics]


def _image_of(job: CloudJob, region: str) -> str:
    """The Hugging Face container of the versions that are asked for."""
    from sagemaker.core import image_uris

    return str(
        image_uris.retrieve(
            framework="huggingface",
            region=region,
            version=job.versions["transformers_version"],
            base_framework_version=f"pytorch{job.versions['pytorch_version']}",
            py_version=job.versions["py_version"],
            instance_type=job.instance_type,
            image_scope="training",
        )
    )


def _pick(further: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {new: further[old] for old, new in names.items() if old in further}
