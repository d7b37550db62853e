"""What clients import and catch.

Every name that the installed clients import from accelerate must exist, and on bad input they must see an exception
that a handler for the reference's catches.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    big_modeling,
    data_loader,
    logging,
    notebook_launcher,
    tracking,
    utils,
)
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from harness import Cases
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

cases = Cases()
BadInput = Callable[[Path], Any]
BAD: dict[str, dict[str, BadInput]] = {}


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def sampler(size: int = 4) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(10)), size, False)


def checkpoint(folder: Path, model: torch.nn.Module | None = None) -> str:
    from safetensors.torch import save_file

    save_file((model or linear()).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


class Nameless(tracking.GeneralTracker):
    """A tracker without the attributes that one needs."""


def cpu(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def twice(folder: Path) -> None:
    """Automatic names, and the folder of the first exists already."""
    configuration = utils.ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = cpu(project_config=configuration)
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0
    accelerator.save_state()


def dispatched(folder: Path) -> torch.nn.Module:
    with big_modeling.init_empty_weights():
        model = linear()
    return big_modeling.load_checkpoint_and_dispatch(
        model, checkpoint(folder), {"0": "cpu", "1": "disk"}, offload_folder=str(folder / "offload")
    )


def out_of_memory(batch_size: int) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


BAD["accelerator"] = {
    "mixed_precision": lambda _: cpu(mixed_precision="fp12"),
    "mixed_precision type": lambda _: cpu(mixed_precision=16),
    "fp16 on the CPU": lambda _: cpu(mixed_precision="fp16"),
    "log_with": lambda _: cpu(log_with="nothing"),
    "kwargs_handlers": lambda _: cpu(kwargs_handlers=[object()]),
    "kwargs_handlers twice": lambda _: cpu(
        kwargs_handlers=[DistributedDataParallelKwargs(), DistributedDataParallelKwargs()]
    ),
    "fsdp_plugin": lambda _: cpu(fsdp_plugin="full_shard"),
    "deepspeed_plugin": lambda _: cpu(deepspeed_plugin="zero"),
    "parallelism_config": lambda _: cpu(parallelism_config="tp"),
    "dynamo_backend": lambda _: cpu(dynamo_backend="nothing"),
    "dynamo twice": lambda _: cpu(dynamo_backend="eager", dynamo_plugin=utils.TorchDynamoPlugin(backend="eager")),
    "accumulation twice": lambda _: cpu(
        gradient_accumulation_steps=2,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=3),
    ),
    "gradient_accumulation_steps": lambda _: cpu(gradient_accumulation_steps=0),
    "rng_types": lambda _: cpu(rng_types=["nothing"]),
    "dataloader_config": lambda _: cpu(dataloader_config="dispatch"),
    "unknown argument": lambda _: cpu(nothing=1),
    "another precision": lambda _: (cpu(), cpu(mixed_precision="bf16")),
    "dispatch and split": lambda _: DataLoaderConfiguration(split_batches=True, unknown=1),
    "get_tracker": lambda _: cpu().get_tracker("nothing"),
    "device_placement": lambda _: cpu().prepare(linear(), device_placement=[True, False]),
    "register_for_checkpointing": lambda _: cpu().register_for_checkpointing(object()),
    "load_state without a folder": lambda _: cpu().load_state(),
    "load_state of a missing folder": lambda folder: cpu().load_state(str(folder / "missing")),
    "save_state without a folder": lambda _: cpu().save_state(),
    "save_state onto an existing folder": twice,
    "save_model of meta weights": lambda folder: cpu().save_model(linear().to("meta"), str(folder / "model")),
    "save_model into a file": lambda folder: cpu().save_model(linear(), written(folder, "file", "")),
    "on_process": lambda _: cpu().on_process(print)(),
    "lomo_backward": lambda _: cpu().lomo_backward(torch.zeros(1, requires_grad=True), 0.1),
    "reduce": lambda _: cpu().reduce(torch.ones(1), "nothing"),
    "backward of a number": lambda _: cpu().backward(1.0),
    "unwrap nothing": lambda _: cpu().unwrap_model(None),
    "init_trackers": lambda _: cpu(log_with=[5]).init_trackers("run"),
    "join without DDP": lambda _: cpu().join_uneven_inputs([linear()]).__enter__(),
    "state attribute": lambda _: cpu().state.nothing,
    "attribute": lambda _: cpu().nothing,
}
BAD["plugins"] = {
    "fsdp sharding_strategy": lambda _: FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="nothing"),
    "fsdp backward_prefetch": lambda _: FullyShardedDataParallelPlugin(fsdp_version=1, backward_prefetch="nothing"),
    "fsdp state_dict_type": lambda _: FullyShardedDataParallelPlugin(state_dict_type="nothing"),
    "fsdp auto_wrap_policy": lambda _: FullyShardedDataParallelPlugin(auto_wrap_policy="nothing"),
    "fsdp version": lambda _: FullyShardedDataParallelPlugin(fsdp_version=3),
    "fsdp mixed_precision": lambda _: FullyShardedDataParallelPlugin(mixed_precision_policy="fp12"),
    "fsdp layer class": lambda _: FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Nothing"]
    ).set_auto_wrap_policy(linear()),
    "fsdp min_num_params": lambda _: FullyShardedDataParallelPlugin(
        auto_wrap_policy="size_based_wrap", min_num_params="many"
    ),
    "parallelism size": lambda _: ParallelismConfig(tp_size=0),
    "parallelism type": lambda _: ParallelismConfig(tp_size="two"),
    "parallelism world": lambda _: cpu(parallelism_config=ParallelismConfig(dp_replicate_size=3)),
    "parallelism axes": lambda _: ParallelismConfig(cp_size=2, sp_size=2),
    "deepspeed config": lambda _: DeepSpeedPlugin(hf_ds_config=5),
    "deepspeed file": lambda _: DeepSpeedPlugin(hf_ds_config="missing.json"),
    "comm_hook": lambda _: DistributedDataParallelKwargs(comm_hook="nothing"),
    "profile activities": lambda _: utils.ProfileKwargs(activities=["nothing"]).build(),
    "dynamo plugin": lambda _: utils.TorchDynamoPlugin(backend="nothing"),
    "dynamo mode": lambda _: utils.TorchDynamoPlugin(backend="eager", mode="nothing"),
    "te format": lambda _: utils.TERecipeKwargs(fp8_format="nothing"),
    "te amax": lambda _: utils.TERecipeKwargs(amax_compute_algo="nothing"),
    "unknown argument": lambda _: utils.GradScalerKwargs(nothing=1),
    "bnb both": lambda _: utils.BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True),
    "bnb none": lambda _: utils.BnbQuantizationConfig(),
    "bnb 8bit type": lambda _: utils.BnbQuantizationConfig(load_in_8bit="yes"),
    "bnb quant type": lambda _: utils.BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nothing"),
    "bnb compute dtype": lambda _: utils.BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=5),
    "bnb skip": lambda _: utils.BnbQuantizationConfig(load_in_8bit=True, skip_modules="lm_head"),
    "bnb torch_dtype": lambda _: utils.BnbQuantizationConfig(load_in_8bit=True, torch_dtype=5),
}
BAD["data"] = {
    "split of an odd batch": lambda _: data_loader.BatchSamplerShard(sampler(5), 2, 0, split_batches=True),
    "iterable split of an odd batch": lambda _: data_loader.IterableDatasetShard(
        range(9), batch_size=5, num_processes=2, split_batches=True
    ),
    "prepare an odd split": lambda _: data_loader.prepare_data_loader(
        DataLoader(range(10), batch_size=5), num_processes=2, process_index=0, split_batches=True
    ),
    "process_index": lambda _: data_loader.prepare_data_loader(DataLoader(range(10)), num_processes=2, process_index=2),
    "dispatch and no data": lambda _: data_loader.prepare_data_loader([1, 2], num_processes=2, process_index=0),
    "seedable sampler of a list": lambda _: next(iter(data_loader.SeedableRandomSampler([]))),
    "skip_first_batches of a list": lambda _: list(data_loader.skip_first_batches(range(3), 1)),
    "split_between_processes": lambda _: cpu().split_between_processes(5).__enter__(),
    "split of uneven dict": lambda _: cpu().split_between_processes({"a": [1], "b": [1, 2]}).__enter__(),
}
BAD["big models"] = {
    "device_map name": lambda folder: big_modeling.load_checkpoint_and_dispatch(
        linear(), checkpoint(folder), "nothing"
    ),
    "device_map misses a module": lambda folder: big_modeling.load_checkpoint_and_dispatch(
        linear(), checkpoint(folder), {"0": "cpu"}
    ),
    "dispatch misses a module": lambda _: big_modeling.dispatch_model(linear(), {"0": "cpu"}),
    "disk without a folder": lambda _: big_modeling.dispatch_model(linear(), {"0": "cpu", "1": "disk"}),
    "load disk without a folder": lambda folder: big_modeling.load_checkpoint_in_model(
        linear(), checkpoint(folder), {"0": "cpu", "1": "disk"}
    ),
    "missing checkpoint": lambda folder: big_modeling.load_checkpoint_in_model(linear(), str(folder / "missing")),
    "empty folder": lambda folder: big_modeling.load_checkpoint_in_model(linear(), str(folder)),
    "missing keys": lambda folder: big_modeling.load_checkpoint_in_model(
        linear(), checkpoint(folder, torch.nn.Linear(2, 2)), strict=True
    ),
    "other shapes": lambda folder: big_modeling.load_checkpoint_in_model(
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), checkpoint(folder)
    ),
    "not safetensors": lambda folder: utils.load_state_dict(written(folder, "broken.safetensors", "text")),
    "not torch": lambda folder: utils.load_state_dict(written(folder, "broken.bin", "text")),
    "check_device_map": lambda _: utils.check_device_map(linear(), {"0": "cpu"}),
    "set unknown tensor": lambda _: utils.set_module_tensor_to_device(linear(), "nothing", "cpu"),
    "set unknown module": lambda _: utils.set_module_tensor_to_device(linear(), "5.weight", "cpu"),
    "set meta without a value": lambda _: utils.set_module_tensor_to_device(linear().to("meta"), "0.weight", "cpu"),
    "set another shape": lambda _: utils.set_module_tensor_to_device(
        linear(), "0.weight", "cpu", value=torch.zeros(3, 3)
    ),
    "size": lambda _: utils.convert_file_size_to_int("10X"),
    "size type": lambda _: utils.convert_file_size_to_int([]),
    "dtype size": lambda _: utils.dtype_byte_size("nothing"),
    "no offloaded weights": lambda _: utils.OffloadedWeightsLoader(),
    "offloaded weight": lambda _: utils.OffloadedWeightsLoader(state_dict={"a": torch.ones(1)})["b"],
    "prefixed weight": lambda _: utils.PrefixedDataset({"a": 1}, "x.")["b"],
    "find_device": lambda _: utils.find_device([]) + 1,
    "move an offloaded model": lambda folder: dispatched(folder).to("meta"),
    "max_memory": lambda _: utils.infer_auto_device_map(linear(), max_memory={"cpu": "much"}),
    "max_memory key": lambda _: utils.infer_auto_device_map(linear(), max_memory={"gpu": "1GB"}),
    "device 7": lambda _: big_modeling.dispatch_model(linear(), {"": 7}),
    "init_on_device": lambda _: big_modeling.init_on_device("nothing").__enter__() or linear(),
    "8 bits of nothing": lambda _: utils.load_and_quantize_model(linear(), None),
    "merge_fsdp_weights": lambda folder: utils.merge_fsdp_weights(str(folder / "missing"), str(folder / "out")),
}
BAD["utilities"] = {
    "logger before the state": lambda _: logging.get_logger("x").info("text"),
    "logger level": lambda _: logging.get_logger("x", log_level="nothing"),
    "log_line": lambda _: (PartialState(cpu=True), logging.get_logger("x").log("nothing", "text")),
    "tracker without attributes": lambda _: Nameless(),
    "filter_trackers": lambda _: tracking.filter_trackers(["nothing"]),
    "batch size argument": lambda _: utils.find_executable_batch_size(lambda: None)(),
    "batch size given": lambda _: utils.find_executable_batch_size(lambda batch_size: None)(4),
    "no batch size": lambda _: utils.find_executable_batch_size(out_of_memory, starting_batch_size=4)(),
    "another failure": lambda _: utils.find_executable_batch_size(lambda batch_size: 1 // 0)(),
    "compare_versions": lambda _: utils.compare_versions("torch", "nothing", "1.0"),
    "is_torch_version": lambda _: utils.is_torch_version("nothing", "1.0"),
    "version": lambda _: utils.is_torch_version(">=", "one"),
    "unknown library": lambda _: utils.compare_versions("no_such_library", ">=", "1.0"),
    "str_to_bool": lambda _: utils.str_to_bool("perhaps"),
    "other type": lambda _: utils.recursively_apply(lambda t: t, 5, error_on_other_type=True),
    "find_batch_size": lambda _: utils.find_batch_size(5),
    "find_batch_size empty": lambda _: utils.find_batch_size([]),
    "find_batch_size of a scalar": lambda _: utils.find_batch_size(torch.tensor(1)),
    "send_to_device": lambda _: utils.send_to_device(torch.ones(1), "nothing"),
    "concatenate": lambda _: utils.concatenate([5, 6]),
    "concatenate shapes": lambda _: utils.concatenate([torch.ones(1, 2), torch.ones(1, 3)]),
    "slice_tensors": lambda _: utils.slice_tensors(5, slice(1)),
    "set_seed": lambda _: utils.set_seed("one"),
    "rng type": lambda _: utils.synchronize_rng_states(["nothing"]),
    "write_basic_config": lambda folder: utils.write_basic_config("fp12", str(folder / "c.yaml")),
    "missing config": lambda folder: load_config_from_file(str(folder / "missing.yaml")),
    "unknown key": lambda folder: load_config_from_file(written(folder, "c.yaml", "no_such_key: 1\n")),
    "broken config": lambda folder: load_config_from_file(written(folder, "c.json", "{")),
    "save nowhere": lambda folder: utils.save(torch.ones(1), str(folder / "missing" / "x.bin")),
    "wrong deepspeed key": lambda _: utils.deepspeed.HfDeepSpeedConfig({"a": 1}).get_value("b.c") + 1,
    "deepspeed config text": lambda _: utils.deepspeed.HfDeepSpeedConfig("{"),
    "gather_object": lambda _: utils.gather_object(),
    "tqdm": lambda _: utils.tqdm(True, range(2)),
    "environment flag": lambda _: utils.patch_environment(5),
    "ProjectConfiguration": lambda _: utils.ProjectConfiguration(total_limit=-1, nothing=1),
    "unwrap": lambda _: utils.extract_model_from_parallel(5) + "",
    "state attribute": lambda _: PartialState(cpu=True).nothing,
    "gradient state": lambda _: GradientState().nothing,
    "accelerator state": lambda _: AcceleratorState(mixed_precision="fp12", cpu=True),
    "on_process without an index": lambda _: PartialState(cpu=True).on_process(print)(),
}


def launched(folder: Path, *words: str, text: str = "print(1)") -> Any:
    script = written(folder, "script.py", text)
    return launch_command(launch_command_parser().parse_args([*words, script]))


BAD["launching"] = {
    "unknown flag": lambda _: launch_command_parser().parse_args(["--no_such_flag", "x.py"]),
    "no script": lambda _: launch_command_parser().parse_args(["--cpu"]),
    "precision": lambda folder: launched(folder, "--cpu", "--mixed_precision", "fp12"),
    "cpu and multi_gpu": lambda folder: launched(folder, "--cpu", "--multi_gpu"),
    "two engines": lambda folder: launched(folder, "--use_deepspeed", "--use_fsdp"),
    "config file": lambda folder: launched(folder, "--config_file", str(folder / "missing.yaml")),
    "failing script": lambda folder: launched(folder, "--cpu", "--num_processes", "1", text="raise SystemExit(3)"),
    "notebook in use": lambda _: (cpu(), notebook_launcher(print, ("",), num_processes=2)),
}


def outcome(bad: BadInput, folder: Path) -> Any:
    """The built-in exception types that catch what it raises, most specific first; or "accepted"."""
    folder.mkdir(parents=True)
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            bad(folder)
    except (Exception, SystemExit) as error:
        if os.environ.get("CASES_TRACEBACK"):
            print(f"{folder.name}: {type(error).__name__}: {error}")
        return raised(error)
    finally:
        os.environ.clear()  # a refused Accelerator of the reference leaves variables behind
        os.environ.update(before)
    return {"accepted": True}


def raised(error: BaseException) -> dict[str, Any]:
    return {"raises": [kind.__name__ for kind in type(error).__mro__[:-1]]}


def add(group: str) -> None:
    def case(folder: Path) -> Any:
        return {
            "refusals": {
                name: outcome(bad, folder / str(index)) for index, (name, bad) in enumerate(BAD[group].items())
            }
        }

    cases.add(f"refusals_{group.replace(' ', '_')}", case, (1,))


for _group in BAD:
    add(_group)


@cases((2,))
def refusals_collectives(folder: Path) -> Any:
    """Ranks pass different things, with debug mode on."""
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    accelerator = cpu()
    rank = accelerator.process_index
    bad: dict[str, BadInput] = {
        "shapes": lambda _: utils.gather(torch.ones(rank + 1)),
        "types": lambda _: utils.gather(torch.ones(1) if rank else [torch.ones(1)]),
        "broadcast": lambda _: utils.broadcast(torch.ones(rank + 1)),
        "reduce": lambda _: utils.reduce(torch.ones(rank + 1)),
        "gather text": lambda _: utils.gather("text"),
        "gather number": lambda _: utils.gather(5),
    }
    found: dict[str, Any] = {}
    for name, action in bad.items():
        try:
            action(folder)
            found[name] = {"accepted": True}
        except Exception as error:
            found[name] = raised(error)
    return {"refusals": found}


CLIENTS = "transformers trl peft diffusers sentence_transformers datasets bitsandbytes torchao deepspeed"


def imports_of(library: str) -> set[tuple[str, str]]:
    """The modules and names that the sources of a library import from accelerate."""
    found = set()
    spec = importlib.util.find_spec(library)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "accelerate" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("accelerate"):
                    found |= {(str(node.module), alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "accelerate"}
    return found


def missing_imports(libraries: str) -> dict[str, Any]:
    """How many names of accelerate libraries import, and those that cannot be imported."""
    missing = []
    imports = {(module, name) for library in libraries.split() for module, name in imports_of(library)}
    for module, name in sorted(imports):
        try:
            loaded = importlib.import_module(module)
            if name and not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            missing.append(f"{module} {name}")
    return {"imports": len(imports), "missing": missing}


@cases((1,))
def client_imports(folder: Path) -> Any:
    return missing_imports(CLIENTS)
