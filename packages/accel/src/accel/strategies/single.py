"""One process: the base class is all there is to do."""

from __future__ import annotations

from .base import Strategy


class SingleStrategy(Strategy):
    """A model on one device."""
