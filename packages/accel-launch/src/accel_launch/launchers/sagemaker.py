"""A training job on Amazon SageMaker: the Hugging Face estimator of SDK 2, or the ModelTrainer of SDK 3."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError, require

from ..cloud.sagemaker_job import SageMakerJob, credentials, describe_job
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand

# Names in SDK 3 of settings of the estimator of SDK 2, by the object that holds them in SDK 3.
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
    """Submits the script to SageMaker, and shows the log of the job until it ends."""

    def run(self, plan: LaunchPlan) -> int:
        job, variables = describe_job(plan), credentials(plan)
        require("sagemaker", purpose="starting a SageMaker training job", install="sagemaker")
        region = plan.settings["aws_region"]
        with patch_environment(**variables):
            print(f"Starting a SageMaker job of {job.instance_count} x {job.instance_type} in {region} ...", flush=True)
            model_data = submit(job, region)
        print(f"You can find your model data at: {model_data}")
        return 0

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the command of the job's machines."""
        job = describe_job(plan)
        args = [word for name, value in job.hyperparameters.items() for word in (f"--{name}", str(value))]
        machine = f"{job.instance_count} x {job.instance_type} of SageMaker, in {plan.settings['aws_region']}"
        container = job.image_uri or ", ".join(f"{name} {value}" for name, value in job.versions.items())
        notes = [
            f"role {job.role}; jobs are called {job.base_job_name}-...",
            f"container: {container}",
            f"uploaded: the directory {job.source_dir}",
            *(f"input channel {name}: {address}" for name, address in job.inputs.items()),
            *(f"{name}: {value}" for name, value in job.sdk_options.items()),
        ]
        notes += ["one process per GPU of every machine"] if job.data_parallel else []
        return [MachineCommand(machine, ["python", job.entry_point, *args], job.environment, notes=notes)]


def submit(job: SageMakerJob, region: str, session: Any = None) -> str:
    """Start the job with the installed SDK, wait for it, and return the address of the model."""
    # SDK 3 consists of several distributions: this package belongs to the one that trains.
    if importlib.util.find_spec("sagemaker.train") is not None:
        return _submit_trainer(job, region, session)
    return _submit_estimator(job, session)


def _submit_estimator(job: SageMakerJob, session: Any) -> str:
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
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in job.metrics.items()] or None,
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}} if job.data_parallel else None,
        debugger_hook_config=False,
        sagemaker_session=session,
        # With a custom image the versions have no effect, but the SDK requires one of them.
        **({"py_version": job.versions["py_version"]} if job.image_uri else job.versions),
        **job.sdk_options,
    )
    estimator.fit(inputs=dict(job.inputs) or None)
    return str(estimator.model_data)


def _submit_trainer(job: SageMakerJob, region: str, session: Any) -> str:
    from sagemaker.train import ModelTrainer
    from sagemaker.train.configs import Compute, InputData, MetricDefinition, Networking, SourceCode, StoppingCondition
    from sagemaker.train.distributed import Torchrun

    allowed = {*_COMPUTE, *_STOPPING, *_NETWORKING}
    unknown = sorted(set(job.sdk_options) - allowed)
    if unknown:
        raise ConfigurationError(
            f"additional_args: {', '.join(unknown)} is not supported with SDK 3 of SageMaker. Allowed: "
            f"{', '.join(sorted(allowed))}; or install 'sagemaker<3'."
        )
    compute, stopping, networking = (_pick(job.sdk_options, names) for names in (_COMPUTE, _STOPPING, _NETWORKING))
    requirements = "requirements.txt" if os.path.isfile(os.path.join(job.source_dir, "requirements.txt")) else None
    inputs = [InputData(channel_name=name, data_source=address) for name, address in job.inputs.items()]
    trainer = ModelTrainer(
        sagemaker_session=session,
        training_image=job.image_uri or _default_image(job, region),
        source_code=SourceCode(source_dir=job.source_dir, entry_script=job.entry_point, requirements=requirements),
        compute=Compute(instance_type=job.instance_type, instance_count=job.instance_count, **compute),
        stopping_condition=StoppingCondition(**stopping) if stopping else None,
        networking=Networking(**networking) if networking else None,
        distributed=Torchrun() if job.data_parallel else None,
        role=job.role,
        base_job_name=job.base_job_name,
        hyperparameters=dict(job.hyperparameters),
        environment=dict(job.environment),
        input_data_config=inputs or None,
    )
    if job.metrics:
        metrics = [MetricDefinition(name=name, regex=regex) for name, regex in job.metrics.items()]
        trainer.with_metric_definitions(metrics)
    trainer.train()
    return str(trainer._latest_training_job.model_artifacts.s3_model_artifacts)


def _default_image(job: SageMakerJob, region: str) -> str:
    """Return the Hugging Face container for the job's versions."""
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


def _pick(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {new: options[old] for old, new in names.items() if old in options}
