"""Comparing versions, against packaging's own order."""

from __future__ import annotations

import importlib.metadata
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version, parse

from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.imports import compare_versions, is_torch_version

OPERATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
versions = st.builds(
    lambda parts, tail: ".".join(map(str, parts)) + tail,
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    st.sampled_from(["", "rc1", ".dev0", "+cpu"]),
)


@given(left=versions, right=versions, operation=st.sampled_from(list(OPERATIONS)))
def test_parsed_versions(left, right, operation):
    assert compare_versions(Version(left), operation, right) == OPERATIONS[operation](Version(left), Version(right))


def test_installed_versions():
    assert compare_versions("packaging", "==", importlib.metadata.version("packaging"))
    assert compare_versions("packaging", ">=", "1.0")
    assert not compare_versions("packaging", "<", "1.0")


def test_torch():
    own = parse(importlib.metadata.version("torch"))  # torch.__version__ may also name the build: 2.6.0+cu124
    assert is_torch_version(">=", "2.4")
    assert is_torch_version("==", own.base_version) == (own == Version(own.base_version))
    assert not is_torch_version("<", "2.4")


@pytest.mark.parametrize("operation", ["~=", "=", "ge", ""])
def test_an_unknown_operation_is_named(operation):
    with pytest.raises(ConfigurationError, match=r"is not one of > >= == != <= <") as caught:
        compare_versions("torch", operation, "2.4")
    assert repr(operation) in str(caught.value)


def test_a_requirement_that_is_no_version_is_named():
    with pytest.raises(ConfigurationError, match="requirement_version='newest'"):
        compare_versions("torch", ">", "newest")


def test_a_package_that_is_not_installed():
    with pytest.raises(MissingDependencyError, match="'no-such-package' is not installed"):
        compare_versions("no-such-package", ">", "1")
