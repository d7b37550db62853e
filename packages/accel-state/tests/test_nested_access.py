"""Reaching into nested attributes and dictionaries."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.containers import merge_dicts, recursive_getattr

trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4), max_leaves=12
)
dictionaries = st.dictionaries(st.sampled_from("abcd"), trees, max_size=4)


def leaves(tree: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, inner in tree.items() for key, value in leaves(inner, (*path, name)).items()}


def test_attributes():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    assert recursive_getattr(model, "training") is True
    with pytest.raises(AttributeError, match="missing"):
        recursive_getattr(model, "0.missing.weight")


def test_merge_in_place():
    destination = {"a": {"d": 3}, "c": 5}
    assert merge_dicts({"a": {"b": 1}, "c": 2}, destination) is destination
    assert destination == {"a": {"d": 3, "b": 1}, "c": 2}


def test_a_dictionary_replaces_another_value():
    assert merge_dicts({"a": {"b": 1}}, {"a": 7}) == {"a": {"b": 1}}
    assert merge_dicts({"a": 7}, {"a": {"b": 1}}) == {"a": 7}


@given(source=dictionaries, destination=dictionaries)
def test_every_leaf_of_the_source_is_there_and_the_source_is_not_changed(source, destination):
    before = copy.deepcopy(source)
    merged = merge_dicts(source, copy.deepcopy(destination))
    assert source == before
    assert leaves(source).items() <= leaves(merged).items()
    assert merge_dicts(source, copy.deepcopy(merged)) == merged
