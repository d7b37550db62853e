"""Runs in a cloud: SageMaker jobs and TPU pods."""
