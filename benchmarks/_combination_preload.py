"""Imports DeepSpeed for the CPU, where it is installed, in the server that the ranks of combinations.py start from."""

from __future__ import annotations

from importlib.util import find_spec

from accel_state.env import patch_environment

if find_spec("deepspeed"):
    with patch_environment(DS_ACCELERATOR="cpu"):
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
