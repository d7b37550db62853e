"""FSDP: settings, wrap policies, initialisation, gradients and checkpoints of sharded models."""
