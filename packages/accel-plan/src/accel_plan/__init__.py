"""Memory, communication and data of one rank of a training configuration, computed in a single process."""

__version__ = "1.0.0"
