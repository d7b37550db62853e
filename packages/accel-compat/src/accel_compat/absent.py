"""Stands for the module of the reference that accel lacks; see UNAVAILABLE in modules.py for its names."""
