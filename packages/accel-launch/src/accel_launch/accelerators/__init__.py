"""Accelerators that can be counted without importing torch, one file per vendor."""
