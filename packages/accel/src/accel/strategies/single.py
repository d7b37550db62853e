"""Training in one process."""

from __future__ import annotations

from .base import Strategy


class SingleStrategy(Strategy):
    """A model on one device; the base class implements it."""
