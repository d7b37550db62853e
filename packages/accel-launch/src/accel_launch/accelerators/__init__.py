"""Accelerators that can be counted without importing torch, one file for each maker."""
