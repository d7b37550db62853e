"""Resolving the configuration, preparing and unwrapping objects, and shared data classes."""
