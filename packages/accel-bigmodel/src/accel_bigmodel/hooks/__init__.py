"""Hooks: what happens before and after the forward of a module."""
