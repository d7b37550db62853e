"""The launcher's settings of 8-bit floating point: flags, section of the configuration file with its older spellings,
variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_the_section_as_documented_with_its_older_spellings(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "mixed_precision: fp8\nfp8_config:\n  amax_compute_algorithm: max\n  amax_history_length: 1024\n  backend: TE\n"
        "  fp8_format: HYBRID\n  interval: 1\n  margin: 0\n  override_linear_precision: false\n  "
        "use_autocast_during_eval: false\n",
    )
    settings = resolve(GROUPS, environ={}, config=config)
    assert settings["mixed_precision"] == "fp8"
    options = settings.group(FP8Options)
    assert (options.backend, options.amax_compute_algo, options.amax_history_len) == ("te", "max", 1024)
    assert options.override_linear_precision == (False, False, False)
    variables = settings.environment()
    assert variables["ACCELERATE_FP8_BACKEND"] == "te" and variables["ACCELERATE_FP8_AMAX_COMPUTE_ALGO"] == "max"
    assert FP8Options.from_environment(variables) == options


@pytest.mark.parametrize(
    ("text", "level"), [("backend: MSAMP\n  opt_level: O1", "O1"), ("backend: MSAMP\n  optimization_level: O2", "O2")]
)
def test_the_section_of_msamp(tmp_path: Path, text: str, level: str) -> None:
    options = resolve(GROUPS, environ={}, config=read(tmp_path, f"fp8_config:\n  {text}\n")).group(FP8Options)
    assert (options.backend, options.opt_level) == ("msamp", level)


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    config = read(tmp_path, "fp8_config:\n  margin: 1\n  interval: 2\n  amax_history_len: 3\n")
    environ = {"ACCELERATE_FP8_MARGIN": "4", "ACCELERATE_FP8_INTERVAL": "5"}
    options = resolve(GROUPS, {"fp8_margin": "6"}, environ, config).group(FP8Options)
    assert (options.margin, options.interval, options.amax_history_len) == (6, 5, 3)


def test_two_spellings_that_disagree(tmp_path: Path) -> None:
    config = read(tmp_path, "fp8_config:\n  amax_history_len: 3\n  amax_history_length: 4\n")
    with pytest.raises(ConfigurationError, match=r"amax_history_length: 4 .*contradicts .*amax_history_len: 3"):
        resolve(GROUPS, environ={}, config=config)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("backend", "cutlass", "native, ao, te, msamp"),
        ("fp8_format", "E3M4", "HYBRID, E4M3, E5M2"),
        ("amax_compute_algo", "mean", "max, most_recent"),
        ("margin", "-1", "from 0 to 32"),
        ("margin", "true", "from 0 to 32"),
        ("interval", "0", "at least 1"),
        ("amax_history_len", "0", "from 1 to 1000000"),
        ("override_linear_precision", "[true, false]", "fprop, dgrad and wgrad"),
        ("override_linear_precision", "maybe", "neither true nor false"),
        ("pad_inner_dim", "maybe", "neither true nor false"),
        ("scaling", "static", "delayed, dynamic, rowwise"),
        ("ao_recipe", "mx", "tensorwise, rowwise, rowwise_with_gw_hp"),
        ("opt_level", "O3", "O1, O2"),
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


@pytest.mark.parametrize(
    ("name", "value"), [("backend", 1), ("margin", 2.0), ("interval", 0), ("pad_inner_dim", "yes"), ("scaling", None)]
)
def test_what_code_may_not_give(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        checked(name, value)


def test_other_settings_pass_as_they_are() -> None:
    assert checked("config", 3) == 3
