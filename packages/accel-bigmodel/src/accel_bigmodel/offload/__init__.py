"""Weights that live on the CPU or on disk until a forward needs them."""
