"""Quantization methods."""
