"""Make reference_api.json: names, parameters and defaults of the reference that `accel` keeps, as a table of facts.

    python tests/facts/make_reference_api.py LIST

LIST is a text with a heading for each module of the reference (`## accelerate.state`), and a line for each name as
`inspect.signature` prints it:

    - class `GradientState(gradient_accumulation_plugin: 'GradientAccumulationPlugin | None' = None)`
        - property `num_steps`
    - enum `RNGType`: TORCH=torch, CUDA=cuda
    - `gather(tensor)`

The table says where in `accel` a name lives, and which modules of the reference list it. What this version leaves out
is in LATER, with the reason: run this again after taking a name out of it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import compact_json

TABLE = Path(__file__).with_name("reference_api.json")

LAUNCHER = "the rest of the launcher"
MEGATRON = "Megatron: steps of preparation for Megatron-LM's own scripts, which Megatron-core does not have"

# Modules of the reference that come whole with a later version.
LATER_MODULES = {
    "accelerate.utils.megatron_lm": MEGATRON,
}

# Names that are not in this version, or parts of a class ("Accelerator.save_state"), whatever module lists them.
LATER = {
    LAUNCHER: "prepare_deepspeed_cmd_env prepare_sagemager_args_inputs install_xla",
    MEGATRON: """
        add_model_config_to_megatron_parser MegatronLMPlugin.set_mixed_precision MegatronLMPlugin.set_network_size_args
        MegatronLMPlugin.set_optimizer_type MegatronLMPlugin.set_scheduler_args
        MegatronLMPlugin.set_tensorboard_logging_options MegatronLMDummyDataLoader.set_megatron_data_args
        MegatronLMDummyDataLoader.get_train_valid_test_datasets_provider
        MegatronLMDummyDataLoader.build_train_valid_test_data_iterators
        """,
}

# Names that the reference merely passes on in the module that lists them; they live in accel.utils.
HOMES = {
    "accelerate.state": "AcceleratorState GradientState ThreadLocalSharedDict PartialState do_nothing is_initialized",
    "accelerate.data_loader": """
        BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin
        IterableDatasetShard SeedableRandomSampler SkipBatchSampler SkipDataLoader get_sampler prepare_data_loader
        skip_first_batches
        """,
    "accelerate.checkpointing": """
        get_pretty_name load load_accelerator_state load_custom_state save save_accelerator_state save_custom_state
        """,
    "accelerate.optimizer": "AcceleratedOptimizer move_to_device patch_optimizer_step",
    "accelerate.scheduler": "AcceleratedScheduler",
    "accelerate.launchers": "PrepareForLaunch get_current_device_type get_gpu_info test_launch",
    "accelerate.logging": "MultiProcessAdapter get_logger",
    "accelerate.local_sgd": "LocalSGD",
    "accelerate.tracking": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LoggerType MLflowTracker SwanLabTracker
        TensorBoardTracker TrackioTracker WandBTracker filter_trackers get_available_trackers on_main_process
        register_tracker_class
        """,
}
# ... and the other way round: names whose home is another module than the one that lists them first.
MOVED = {"get_logger": "accel.logging"}

# Names that a module of a later version lists first, and that are in this one.
NOW = """
    clear_device_cache convert_bytes copy_tensor_to_devices find_device ignorant_find_batch_size listify load
    pad_input_tensors save str_to_bool
    """

# The documents call their constructors with one argument, which is not the signature: only the name is kept.
TWO_FORMS = "GPTTrainStep BertTrainStep T5TrainStep"

# The value cannot be written down (a factory, a marker object) or is the reference's private business: only the name is
# kept.
ANY = {"any": True}

_ENTRY = re.compile(
    r"^(?P<indent> *)- (?:(?P<kind>class|enum|property) )?`(?P<name>\w+)(?P<signature>\(.*\))?(?: -> .*)?`(?:: "
    r"(?P<values>.*))?$"
)


def main(listing: Path) -> None:
    later = {name: reason for reason, names in LATER.items() for name in names.split()}
    table: dict[str, Any] = {"names": {}, "not in this version": {}, "listed in": {}}
    for section, entries in _sections(listing.read_text(encoding="utf-8")).items():
        for name, fact in entries.items():
            module = _home(section, name)
            table["listed in"].setdefault(section, {})[name] = f"{module}.{name}"
            reason = None if _is_now(name) else LATER_MODULES.get(section) or later.pop(name, None)
            if reason is not None:
                table["not in this version"][f"{module}.{name}"] = reason
                continue
            if name in TWO_FORMS.split():
                del fact["parameters"]
            for member in list(fact.get("members", {})):
                if (reason := later.pop(f"{name}.{member}", None)) is not None:
                    table["not in this version"][f"{module}.{name}.{member}"] = reason
                    del fact["members"][member]
            table["names"][f"{module}.{name}"] = fact
    if later:
        sys.exit(f"LATER has names that the list has not: {', '.join(later)}")
    TABLE.write_text(compact_json.dumps(table) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(table['names'])} names, {len(table['not in this version'])} not in this version")


def _is_now(name: str) -> bool:
    # Whether a library is installed can be asked in every version.
    return name in NOW.split() or re.fullmatch(r"is_\w+_available", name) is not None


def _home(section: str, name: str) -> str:
    if name in MOVED:
        return MOVED[name]
    if (_is_now(name) and section in LATER_MODULES) or (section in HOMES and name not in HOMES[section].split()):
        return "accel.utils"
    return section.replace("accelerate", "accel", 1)


def _sections(text: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    owner: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            entries = sections.setdefault(line[3:].strip(), {})
        elif found := _ENTRY.match(line):
            fact = _fact(found)
            if found["indent"]:
                owner.setdefault("members", {})[found["name"]] = fact
            else:
                entries[found["name"]] = owner = fact
        elif line.lstrip().startswith("- "):
            sys.exit(f"cannot read: {line}")
    return sections


def _fact(found: re.Match[str]) -> dict[str, Any]:
    if found["values"] is not None:
        return {"kind": "enum", "values": dict(pair.split("=", 1) for pair in found["values"].split(", "))}
    kind = found["kind"] or "function"
    if found["signature"] is None:
        return {"kind": kind}
    parameters = [_parameter(text) for text in _split(found["signature"][1:-1])]
    if [name for name, *_ in parameters] == ["*args", "**kwargs"]:
        return {"kind": kind}  # what a decorator leaves of a signature says nothing about the parameters
    return {"kind": kind, "parameters": [parameter for parameter in parameters if parameter[0] != "self"]}


def _parameter(text: str) -> list[Any]:
    """[name] or [name, default]; a name keeps its stars."""
    pieces = _split(text, "=")
    name = pieces[0].split(":")[0].strip()
    return [name] if len(pieces) == 1 else [name, _default("=".join(pieces[1:]).strip())]


def _default(text: str) -> Any:
    if member := re.fullmatch(r"<\w+\.\w+: (.+)>", text):
        return ast.literal_eval(member[1])
    if text in {"<factory>", "<unset>", "is_torch_tensor"} or "/" in text:
        return ANY
    value = ast.literal_eval(text)
    return {"tuple": list(value)} if isinstance(value, tuple) else value


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that are in no bracket and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        elif character == separator and depth == 0:
            pieces.append("")
            continue
        pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
