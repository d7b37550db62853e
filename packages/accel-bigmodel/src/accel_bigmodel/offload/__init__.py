"""Weights that stay in host memory or on the disk until a forward needs them."""
