"""The launcher's settings of 8-bit floating point: flags, section of the configuration file with its older spellings,
variables.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, CoreOptions, FP8Options, resolve
from accel_state.options.fp8 import checked, parse_override

GROUPS = (CoreOptions, FP8Options)


def read(folder: Path, text: str) -> ConfigFile:
    file = folder / "config.yaml"
    file.write_text(text)
    return ConfigFile.read(file)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("amax_compute_algo", "mean", "max, most_recent"),
        ("override_linear_precision", "[true, false]", "fprop, dgrad and wgrad"),
        ("override_linear_precision", "maybe", "neither true nor false"),
    ],
)
def test_a_bad_value_in_a_file_is_refused_with_its_place_and_the_allowed_ones(
    tmp_path: Path, key: str, value: str, allowed: str
) -> None:
    config = read(tmp_path, f"fp8_config:\n  {key}: {value}\n")
    with pytest.raises(ConfigurationError, match=rf"fp8_config\.{key} in .*line 2") as error:
        resolve(GROUPS, environ={}, config=config)
    assert allowed in str(error.value)


@given(st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_every_override_survives_each_of_its_spellings(switches: tuple[bool, bool, bool]) -> None:
    (opt,) = [opt for opt in FP8Options.options() if opt.field == "override_linear_precision"]
    assert opt.parse(opt.format(switches), "variable") == switches
    assert opt.parse(list(switches), "file") == switches
    assert parse_override(",".join("yes" if switch else "no" for switch in switches)) == switches
    assert checked("override_linear_precision", list(switches)) == switches


@pytest.mark.parametrize("text", ["true,false", "true,false,true,true", "", "1;2;3"])
def test_what_is_no_override(text: str) -> None:
    with pytest.raises(ValueError):
        parse_override(text)
