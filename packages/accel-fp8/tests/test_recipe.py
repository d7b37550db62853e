"""Allowed values of recipes, from code and from the launcher."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from torch import nn

from accel_fp8 import FP8Recipe, filter_linear_layers, find_first_last_linear_layers
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.options import FP8Options


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"backend": "TE2"}, "native, ao, te, msamp"),
        ({"backend": 3}, "native, ao, te, msamp"),
        ({"fp8_format": "E3M4"}, "HYBRID, E4M3, E5M2"),
        ({"fp8_format": None}, "HYBRID, E4M3, E5M2"),
        ({"amax_compute_algo": "mean"}, "max, most_recent"),
        ({"scaling": "static"}, "delayed, dynamic, rowwise"),
        ({"opt_level": "O3"}, "O1, O2"),
        ({"ao_recipe": "mxfp8"}, "tensorwise, rowwise, rowwise_with_gw_hp"),
        ({"margin": -1}, "an integer from 0 to 32"),
        ({"margin": 1.5}, "an integer from 0 to 32"),
        ({"margin": 33}, "an integer from 0 to 32"),
        ({"interval": 0}, "an integer of at least 1"),
        ({"interval": True}, "an integer of at least 1"),
        ({"amax_history_len": 0}, "an integer from 1 to 1000000"),
        ({"pad_inner_dim": 1}, "is not true or false"),
        ({"use_autocast_during_eval": "no"}, "is not true or false"),
        ({"override_linear_precision": (True, False)}, "fprop, dgrad and wgrad"),
        ({"override_linear_precision": "true,false"}, "fprop, dgrad and wgrad"),
        ({"module_filter_func": "0"}, "is not callable"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_the_allowed_ones(setting: dict[str, Any], allowed: str) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ConfigurationError) as error:
        FP8Recipe(**setting)
    assert f"{name}={value!r}" in str(error.value) and allowed in str(error.value)


def test_override_linear_precision_is_converted_to_booleans() -> None:
    assert FP8Recipe(override_linear_precision=(1, 0, 0)).override_linear_precision == (True, False, False)  # type: ignore[arg-type]
    assert FP8Recipe(override_linear_precision="true").override_linear_precision == (True, True, True)  # type: ignore[arg-type]


def test_words_are_taken_in_any_case_and_one_switch_stands_for_three() -> None:
    recipe = FP8Recipe(backend="TE", fp8_format="hybrid", amax_compute_algo="MAX", override_linear_precision=True)  # type: ignore[arg-type]
    assert (recipe.backend, recipe.fp8_format, recipe.amax_compute_algo) == ("te", "HYBRID", "max")
    assert recipe.override_linear_precision == (True, True, True)


def test_the_defaults_of_recipes_are_those_of_the_launcher() -> None:
    known = {field.name for field in fields(FP8Recipe)}
    options = FP8Options()
    assert {opt.field for opt in FP8Options.options()} <= known
    assert all(getattr(FP8Recipe(), opt.field) == getattr(options, opt.field) for opt in FP8Options.options())


def test_the_launchers_settings_with_the_callers_on_top() -> None:
    with patch_environment(ACCELERATE_FP8_BACKEND="native", ACCELERATE_FP8_MARGIN="3", ACCELERATE_FP8_FORMAT="E4M3"):
        recipe = FP8Recipe.from_environment(margin=1, fp8_format=None)
    assert (recipe.backend, recipe.margin, recipe.fp8_format) == ("native", 1, "E4M3")
    with (
        patch_environment(ACCELERATE_FP8_MARGIN="many"),
        pytest.raises(ConfigurationError, match="ACCELERATE_FP8_MARGIN.*from 0 to 32"),
    ):
        FP8Recipe.from_environment()


def test_layers_are_filtered_by_name_and_by_dimensions() -> None:
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(10, 16)]
    model = nn.Sequential(*layers)
    ends = find_first_last_linear_layers(model)
    assert ends == ("0", "4") and find_first_last_linear_layers(nn.ReLU()) == (None, None)
    chosen = [name for name, layer in model.named_modules() if name and filter_linear_layers(layer, name, ends)]
    assert chosen == ["1", "2"], "the first by its name, and those that are not multiples of 16 by their dimensions"
