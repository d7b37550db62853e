"""Every private name of torch that accel-checkpoint uses."""

from __future__ import annotations

import torch

# Restores the lazy negation of a tensor that was copied byte by byte; there is no public constructor for such a view.
neg_view = torch._neg_view
