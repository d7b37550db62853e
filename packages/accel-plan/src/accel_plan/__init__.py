"""Memory, communication and data of one rank of a configuration, worked out in a single process."""

__version__ = "1.0.0"
