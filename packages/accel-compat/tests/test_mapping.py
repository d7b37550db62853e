"""`import accelerate` gives accel: the same objects under the reference's module names, and its version."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch

import accel
from accel_compat import COVERED_VERSION, install, shim_path
from accel_compat.modules import Finder, PassedOn, Unavailable

FOLDER = Path(__file__).parents[3] / "tests" / "facts"
MODULES = FOLDER / "reference_modules.json"
PICKLED = ("PartialState", "DistributedType", "DeepSpeedPlugin", "FullyShardedDataParallelPlugin", "ParallelismConfig")
# Of the private names of the reference's modules, those that stand for steps of its own functions.
INTERNAL = """
    ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING TORCH_SAFE_GLOBALS USE_TORCH_XLA _PYTORCH_DATALOADER_ADDITIONAL_KWARGS
    _attach_layerwise_casting_hooks _compiler_disable _distributed_checkpoint_to_merged_weights _find_final_norm
    _get_model_state_dict _handle_megatron_data_iterator _neuron_broadcast_object_list _neuron_gather_object _nvidia_smi
    _parse_cpu_list _prepare_sd_options _refuse_recurrent_layers_under_sequence_parallelism _set_model_state_dict
    _validate_to_fsdp2_args
    """.split()


def run(code: str, **variables: str) -> str:
    """What a fresh interpreter with accelerate mapped to accel prints."""
    path = os.pathsep.join([str(shim_path()), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    kinds = [*(getattr(accel, name) for name in PICKLED), accel.utils.HfDeepSpeedConfig]
    modules = {kind: kind.__module__ for kind in kinds}
    install()
    install()  # a second call changes nothing
    assert sys.path.count(str(shim_path())) == 1
    yield
    # Other tests of this process import libraries that look for accelerate.
    for kind, module in modules.items():
        kind.__module__ = module
    sys.path.remove(str(shim_path()))
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
        module = sys.modules.pop(name)
        added = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Unavailable)]
        for key in added:
            delattr(module, key)
        passed_on = vars(module).get("__getattr__")
        if isinstance(passed_on, PassedOn):
            del vars(module)["__getattr__"]
            if passed_on.own is not None:
                vars(module)["__getattr__"] = passed_on.own


def test_the_version_is_that_of_the_interface() -> None:
    import accelerate

    assert accelerate.__version__ == importlib.metadata.version("accelerate") == COVERED_VERSION
    assert importlib.metadata.packages_distributions()["accelerate"] == ["accelerate"]
    assert importlib.metadata.distribution("accelerate").requires == ["accel-compat"]
    # sentence-transformers looks for its owner in the address.
    assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]
    assert "accelerate" not in vars(accel) and "Accelerator" in dir(accelerate)


def test_modules_are_those_of_accel() -> None:
    import accelerate
    import accelerate.utils.fsdp_utils
    from accelerate.accelerator import Accelerator, AcceleratorState, get_state_dict_offloaded_model
    from accelerate.commands.config import default_config_file
    from accelerate.utils import set_seed

    assert accelerate.Accelerator is Accelerator and issubclass(Accelerator, accel.Accelerator)
    assert signature(Accelerator) == signature(accel.Accelerator) and AcceleratorState is accel.state.AcceleratorState
    for name in ("big_modeling", "utils", "utils.fsdp_utils", "state", "commands.config.config_args"):
        module = importlib.import_module(f"accelerate.{name}")
        assert module is importlib.import_module(f"accel.{name}")
        assert module.__spec__.name == f"accel.{name}"  # importing it under the other name did not change it
    assert get_state_dict_offloaded_model is accel.utils.modeling.get_state_dict_offloaded_model  # of llmcompressor
    assert set_seed is accel.utils.set_seed and default_config_file.endswith(".yaml")
    with pytest.raises(ModuleNotFoundError, match="accelerate.no_such_module"):
        importlib.import_module("accelerate.no_such_module")
    with pytest.raises(ImportError, match="no_such_name"):
        from accelerate import no_such_name  # noqa: F401
    with pytest.raises(AttributeError, match="'accelerate'.*'no_such_name'"):
        accelerate.no_such_name  # noqa: B018


def test_every_module_of_the_reference_has_its_names() -> None:
    missing = []
    for module, names in json.loads(MODULES.read_text(encoding="utf-8")).items():
        loaded = importlib.import_module(module)
        missing += [f"{module}.{name}" for name in names if name not in INTERNAL and not hasattr(loaded, name)]
    assert not missing


def test_names_of_modules_that_accel_lacks_do_what_they_say() -> None:
    from accelerate.commands.config.default import default_config_file, write_basic_config
    from accelerate.commands.estimate import create_empty_model
    from accelerate.commands.launch import launch_command, multi_gpu_launcher
    from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS
    from accelerate.utils.operations import TENSOR_TYPE_TO_INT, _gpu_gather

    assert write_basic_config is accel.utils.write_basic_config and default_config_file.endswith(".yaml")
    assert multi_gpu_launcher is launch_command and _gpu_gather is accel.utils.gather
    assert _PYTORCH_DATALOADER_KWARGS["batch_size"] == 1 and TENSOR_TYPE_TO_INT[torch.bool] == 10
    with pytest.raises(NotImplementedError, match="create_empty_model .* see `accel --help`"):
        create_empty_model("gpt2", "transformers")
    for module, usage in (("accelerate_cli", "usage: accel COMMAND"), ("estimate", "usage: accel estimate-memory")):
        command = [sys.executable, "-m", f"accelerate.commands.{module}", "--help"]
        assert run(
            f"import subprocess; print(subprocess.run({command}, capture_output=True, text=True).stdout)"
        ).startswith(usage)


def test_the_parsers_of_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import argparse

    from accelerate.commands.config import get_config_parser
    from accelerate.commands.config.default import default_command_parser
    from accelerate.commands.config.update import update_command_parser
    from accelerate.commands.env import env_command_parser
    from accelerate.commands.estimate import estimate_command, estimate_command_parser
    from accelerate.commands.merge import merge_command_parser
    from accelerate.commands.test import test_command_parser
    from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser
    from accelerate.commands.tpu import tpu_command_parser

    builders = {
        "config": get_config_parser, "default": default_command_parser, "update": update_command_parser,
        "env": env_command_parser, "estimate-memory": estimate_command_parser, "merge-weights": merge_command_parser,
        "test": test_command_parser, "to-fsdp2": to_fsdp2_command_parser, "tpu-config": tpu_command_parser,
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for name, build in builders.items():
        assert build().format_help()
        build(subparsers)
        with pytest.raises(SystemExit):
            parser.parse_args([name, "--help"])
    file = tmp_path / "config.yaml"
    args = parser.parse_args(["default", "--config_file", str(file)])
    args.func(args)
    assert file.is_file()
    args = parser.parse_args(["env", "--json"])
    capsys.readouterr()
    args.func(args)
    assert "accel-compat version" in capsys.readouterr().out
    args = estimate_command_parser().parse_args(["bert-base-cased", "--library_name", "transformers"])
    assert args.model_name == "bert-base-cased" and args.func is estimate_command


def test_helpers_of_other_test_suites(capsys: pytest.CaptureFixture[str]) -> None:
    import unittest

    import accelerate.test_utils
    from accelerate.test_utils import testing

    assert accelerate.test_utils.get_backend is testing.get_backend
    name, count, used = testing.get_backend()
    assert name == testing.torch_device and count >= 1 and used() >= 0
    assert testing.get_launch_command(num_processes=2, cpu=True, mps=False)[-2:] == ["--num_processes=2", "--cpu"]
    words = [sys.executable, "-c", "print('seen')"]
    assert testing.run_command(words, return_stdout=True) == testing.execute_subprocess_async(words) == "seen\n"
    assert capsys.readouterr().out == "seen\n"
    for run_it in (testing.run_command, testing.execute_subprocess_async):
        with pytest.raises(testing.SubprocessCallException, match="ended with 3"):
            run_it([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(TimeoutError):
        testing.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    decorated = testing.require_cpu(lambda: "ran") if name == "cpu" else testing.require_non_cpu(lambda: "ran")
    assert decorated() == "ran"
    with pytest.raises(unittest.SkipTest):
        (testing.require_non_cpu if name == "cpu" else testing.require_cpu)(lambda: None)()
    for absent in ("accelerate.nothing", "accelerate.nothing.inside"):
        with pytest.raises(ModuleNotFoundError, match="accelerate.nothing"):
            importlib.import_module(absent)


def test_the_layers_for_upcasting_serve_isinstance() -> None:
    from accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING

    assert isinstance(torch.nn.Conv2d(1, 1, 1), SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)


def test_pickles_name_the_classes_of_the_reference() -> None:
    """So that the training_args.bin of a Trainer on accel can be loaded where Accelerate is installed instead."""
    from accelerate import DistributedType, PartialState
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    state = PartialState(cpu=True)
    things = [state, DistributedType.NO, DeepSpeedPlugin(), FullyShardedDataParallelPlugin(), ParallelismConfig()]
    written = pickle.dumps(things, protocol=2)
    modules = {str(word).split(" ")[0] for code, word, _ in pickletools.genops(written) if code.name == "GLOBAL"}
    assert {"accelerate.state", "accelerate.utils.dataclasses", "accelerate.parallelism_config"} <= modules
    assert not [module for module in modules if module.startswith("accel_") or module.startswith("accel.")]
    again = pickle.loads(written)
    assert str(again[0]) == str(state) and again[1] is DistributedType.NO and type(again[2]) is DeepSpeedPlugin


def test_names_that_modules_of_the_reference_import_from_others() -> None:
    from accelerate.checkpointing import is_xpu_available
    from accelerate.tracking import is_wandb_available
    from accelerate.utils.random import AcceleratorState

    assert AcceleratorState is accel.state.AcceleratorState and is_wandb_available() in (True, False)
    assert is_xpu_available is accel.utils.is_xpu_available and accel.tracking.WandBTracker.name == "wandb"
    with pytest.raises(ImportError, match="no_such_name"):
        from accelerate.tracking import no_such_name  # noqa: F401
    with pytest.raises(AttributeError, match="'accel.tracking'.*'__wrapped__'"):
        accel.tracking.__wrapped__  # noqa: B018


def test_a_name_without_a_counterpart_is_refused_when_it_is_used() -> None:
    from accelerate.utils import prepare_deepspeed_cmd_env
    from accelerate.utils.megatron_lm import MegatronEngine, prepare_optimizer

    assert not isinstance(accel.DistributedType.NO, (prepare_optimizer, MegatronEngine))
    for name in (MegatronEngine, prepare_optimizer):
        with pytest.raises(NotImplementedError, match="MegatronLMPlugin.*accelerator.prepare"):
            name(tp_degree=2)
    with pytest.raises(NotImplementedError, match="Use `accel launch`"):
        prepare_deepspeed_cmd_env(None)


def test_names_of_an_extra_that_is_not_installed_exist() -> None:
    printed = run(
        "import sys; sys.modules['accel_megatron'] = None; from accelerate.utils import MegatronLMPlugin\n"
        "try: MegatronLMPlugin(tp_degree=2)\n"
        "except NotImplementedError as error: print(error)"
    )
    assert "pip install 'accel[megatron]'" in printed


def test_in_a_fresh_process_modules_run_and_the_import_is_light() -> None:
    printed = run(
        "import accelerate, sys, importlib.util; print('torch' in sys.modules);"
        "print(importlib.util.find_spec('accelerate.utils').origin);"
        "import accelerate.utils.memory, pickle; from accelerate import DistributedType;"
        "print(pickle.loads(pickle.dumps(DistributedType.NO)) is DistributedType.NO)"
    )
    light, origin, same = printed.splitlines()
    assert light == "False" and origin == accel.utils.__spec__.origin and same == "True"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--help"]
    shown = run(f"import subprocess; print(subprocess.run({command}, capture_output=True, text=True).stdout)")
    assert shown.startswith("usage: accel launch")


def test_another_accelerate_that_is_imported_already_is_refused() -> None:
    printed = run(
        "import types, sys; sys.modules['accelerate'] = types.ModuleType('accelerate');"
        "sys.modules['accelerate'].__file__ = '/elsewhere/accelerate/__init__.py'\n"
        "import accel_compat\n"
        "try: accel_compat.install()\n"
        "except RuntimeError as error: print(error)"
    )
    assert printed.startswith("accelerate is already imported from /elsewhere/accelerate/__init__.py. Call")
