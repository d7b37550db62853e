"""Architectures: how models of Transformers are built and called in Megatron-core. One file each."""
