"""Models of the library peft."""

from __future__ import annotations

import sys
from typing import Any

from .unwrapping import extract_model_from_parallel


def is_peft_model(model: Any) -> bool:
    """Whether a model, wrapped or not, is one of peft's. Where peft has not been imported there can be none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
