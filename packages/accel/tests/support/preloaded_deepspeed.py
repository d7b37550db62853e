"""Imports DeepSpeed in the server that ranks are forked from, with what its engines import when they are built: torch's
compiler, for an optimizer that is never used, takes each rank two seconds.
"""

from __future__ import annotations

from accel_state.env import patch_environment

# DeepSpeed chooses the accelerator of the machine as it is imported; the ranks of tests compute on the CPU.
with patch_environment(DS_ACCELERATOR="cpu"):
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
