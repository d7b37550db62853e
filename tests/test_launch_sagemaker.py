"""Training jobs on Amazon SageMaker: both generations of the real SDK, against moto, which simulates AWS in the same
process.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from components.digits import environment
from components.environments import find, missing

CONFIG = """
base_job_name: accel-digits
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p3.16xlarge
iam_role_name: arn:aws:iam::123456789012:role/train
image_uri: null
mixed_precision: fp16
num_machines: 2
py_version: py38
pytorch_version: 1.10.2
region: us-east-1
transformers_version: 4.17.0
use_cpu: false
sagemaker_inputs_file: inputs.tsv
additional_args:
  max_run: 3600
  enable_network_isolation: true
"""

# moto has no SimulatePrincipalPolicy, with which SDK 3 asks whether the role may do what the job needs.
JOB = """
import json
import boto3
import botocore.client
from moto import mock_aws
from accel_launch.cli import main

call = botocore.client.BaseClient._make_api_call
def answer(client, operation, arguments):
    if operation != "SimulatePrincipalPolicy":
        return call(client, operation, arguments)
    allowed = [{"EvalActionName": name, "EvalDecision": "allowed"} for name in arguments["ActionNames"]]
    return {"EvaluationResults": allowed, "IsTruncated": False}
botocore.client.BaseClient._make_api_call = answer

with mock_aws():
    trusted = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [trusted]})
    boto3.client("iam").create_role(RoleName="train", AssumeRolePolicyDocument=policy)
    boto3.client("s3").create_bucket(Bucket="bucket")
    arguments = ["--lr", "0.1", "--epochs=3", "--shuffle", "True"]
    code = main(["launch", "--config_file", "c.yaml", "source/train.py", *arguments])
    client = boto3.client("sagemaker")
    names = [job["TrainingJobName"] for job in client.list_training_jobs()["TrainingJobSummaries"]]
    jobs = [client.describe_training_job(TrainingJobName=name) for name in names]
    print("JOBS " + json.dumps([code, jobs], default=str))
"""


@pytest.mark.component
@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "sdk",
    [pytest.param("sagemaker2", marks=pytest.mark.slow), "sagemaker3"],  # the older SDK; the newer one is fast
)
def test_a_job_is_created(tmp_path, sdk) -> None:
    if missing(sdk):
        pytest.skip(missing(sdk))
    (tmp_path / "source").mkdir()
    for name, text in {
        "c.yaml": CONFIG,
        "job.py": JOB,
        "source/train.py": "",
        "inputs.tsv": "channel\taddress\ntrain\ts3://bucket/train\n",
    }.items():
        (tmp_path / name).write_text(text)
    secrets = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    env = environment(HOME=str(tmp_path), SAGEMAKER_SUPPRESS_V2_WARNING="1", **secrets)
    done = subprocess.run(
        [str(find(sdk)), "job.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    code, (job,) = json.loads(done.stdout[done.stdout.rindex("JOBS ") + 5 :])
    assert code == 0 and job["TrainingJobName"].startswith("accel-digits-")
    assert (job["ResourceConfig"]["InstanceType"], job["ResourceConfig"]["InstanceCount"]) == ("ml.p3.16xlarge", 2)
    assert (
        "huggingface-pytorch-training:1.10.2-transformers4.17.0-gpu-py38"
        in job["AlgorithmSpecification"]["TrainingImage"]
    )
    assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == 3600 and job["EnableNetworkIsolation"] is True
    assert job["RoleArn"].endswith("role/train")
    addresses = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in job["InputDataConfig"]
    }
    assert addresses["train"] == "s3://bucket/train" and "code" in addresses
    given = job["HyperParameters"]
    assert (given["lr"], given["epochs"], given["shuffle"]) == ("0.1", "3", "true")
    assert "You can find your model data at: s3://" in done.stdout
