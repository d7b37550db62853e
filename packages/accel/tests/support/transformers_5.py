"""A mark for tests of what models have since Transformers 5: stacked experts, whole plans, attention by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from accel_state.imports import compare_versions

needs_transformers_5 = pytest.mark.skipif(
    find_spec("transformers") is None or compare_versions("transformers", "<", "5.0"), reason="needs transformers 5"
)
