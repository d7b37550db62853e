"""The flags of the reference's launcher are in ours, with the same types, defaults and choices
(tests/facts/reference_launch.json).
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from accel_state.options import Option, load_groups

TABLE = json.loads(Path(__file__).parent.joinpath("facts", "reference_launch.json").read_text(encoding="utf-8"))
OPTIONS = {flag: opt for group in load_groups() for opt in group.options() for flag in (*opt.flags, *opt.undo_flags)}

# The parser's own.
OURS_BY_NATURE = {"--help"}

# Where a default differs, and why.
DEFAULTS = {
    "--dynamo_mode": (None, "an option that is not set exports nothing; torch.compile's own default is the same"),
    "--no_tpu_cluster": (False, "undoes --tpu_cluster; its default there is that of the opposite flag"),
    "--num_machines": (1, "the number that is used there by default"),
    "--machine_rank": (0, "the same"),
    "--main_training_function": ("main", "the same"),
}
KINDS = {
    "--zero3_init_flag": bool,
    "--zero3_save_16bit_model": bool,
    "--parallelism_config_sp_seq_length": int,
    "--vm": tuple,
    "--env": tuple,
}
# Variables of the reference without an option, and what reads or sets them instead.
NO_OPTION = {
    "ACCELERATE_ALLOW_CP_STANDALONE": "a switch of the mesh's own",
    "ACCELERATE_BYPASS_DEVICE_MAP": "a switch of big models",
    "ACCELERATE_CONFIG_DS_FIELDS": "set by the launcher: the options that were set for DeepSpeed",
    "ACCELERATE_DEBUG_RDV_FILE": "of the reference's debug launcher",
    "ACCELERATE_ENABLE_RICH": "accel prints plain text",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "a switch of big models",
    "ACCELERATE_LOG_LEVEL": "read by accel_state.logging",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "set by the SageMaker launcher",
    "ACCELERATE_TORCH_DEVICE": "read by the Accelerator",
    "ACCELERATE_USE_SAGEMAKER": "set by the SageMaker launcher",
}


def kind_of(fact: dict[str, Any]) -> Any:
    """The type of a value, where it is not plain text: 'true' and 'false' are texts that mean a switch."""
    if fact["default"] in ("true", "false") or fact["type"] in ("flag", "bool", "str_to_bool"):
        return bool
    return {"int": int, "float": float}.get(fact["type"])


@pytest.mark.parametrize("flag", sorted(set(TABLE["flags"]) - OURS_BY_NATURE))
def test_flag(flag: str) -> None:
    fact = TABLE["flags"][flag]
    assert flag in OPTIONS, f"{flag} is not an option"
    opt: Option = OPTIONS[flag]
    assert all(OPTIONS.get(name) is opt for name in fact["flags"]), "every spelling sets the same option"
    kind = KINDS.get(flag) or kind_of(fact)
    assert kind is None or opt.kind is kind
    assert opt.is_flag or fact["type"] != "flag", "given alone there"
    assert not opt.is_flag or fact["type"] == "flag", "takes a value there"
    assert _default_agrees(flag, opt, fact["default"])
    for choice in fact.get("choices", ()):
        opt.parse(choice, flag)


def _default_agrees(flag: str, opt: Option, default: Any) -> bool:
    if flag in DEFAULTS:
        return bool(opt.default == DEFAULTS[flag][0])
    if default in (None, False, ""):
        return opt.default in (None, False, "", ())
    return bool(opt.default == opt.parse(str(default), flag))


def test_exceptions_are_needed() -> None:
    assert set(DEFAULTS) | set(KINDS) <= set(TABLE["flags"])
    variables = {opt.env for opt in OPTIONS.values()}
    assert not variables & set(NO_OPTION), "these have an option now"
    assert set(NO_OPTION) <= set(TABLE["variables"])


def test_variables() -> None:
    """Variables that other libraries read are set under the names that they read."""
    variables = {opt.env for opt in OPTIONS.values()}
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
    wanted = {name for name in TABLE["variables"] if name.startswith(prefixes)}
    assert not wanted - variables - set(NO_OPTION)


def test_the_documentation_has_every_option() -> None:
    """docs/reference/options.md is made from the declarations when the documentation is built."""
    file = Path(__file__).parent.parent / "docs" / "options.py"
    spec = importlib.util.spec_from_file_location("docs_options", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.reference(file.parent.parent)
    items = {item.split("`")[1]: item for item in re.split(r"^- (?=\*\*`--)", text, flags=re.MULTILINE)[1:]}
    assert items.keys() == {opt.flags[0] for opt in OPTIONS.values()}
    for opt in OPTIONS.values():
        item = items[opt.flags[0]]
        assert opt.help in item
        for word in (opt.env, *opt.keys, *(opt.choices or ())):
            assert word is None or f"`{word}`" in item
