"""`accel config`: only what follows from earlier answers is asked; as text, and on a real terminal with arrow keys."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_launch.config.write import nest, to_text
from accel_launch.questionnaire import flow
from accel_launch.questionnaire.flow import TextPrompts, ask_all, complete, label, propose, questions
from accel_state.enums import REMOVED_DYNAMO_BACKENDS
from accel_state.errors import ConfigurationError
from accel_state.options import Option, check, load_groups, resolve
from accel_state.options.declaration import GIVEN, MORE_THAN_ONE, NO_RANGE
from accel_state.options.registry import all_options

pexpect = pytest.importorskip("pexpect", reason="a terminal to answer in needs pexpect")

OPTIONS = all_options()
DOWN, UP, ENTER = "\x1b[B", "\x1b[A", "\r"


def answer(
    given_answers: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Answer the questions with these answers or the defaults; the file's content and the names of the questions."""
    asked: list[str] = []

    def ask(opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
        asked.append(opt.name)
        assert proposal is None or choices is None or proposal in choices
        return opt.parse(str(given_answers[opt.name]), opt.name) if opt.name in given_answers else proposal

    answers = ask_all(ask, known or {})
    return nest(complete(answers, known or {})), asked


def test_every_question_is_asked_once() -> None:
    local = [opt.name for opt, _ in flow._ordered(flow.LOCAL_ORDER) if opt.question]
    cloud = [opt.name for opt, _ in flow._ordered(flow.CLOUD_ORDER) if opt.question]
    with_question = {name for name, opt in OPTIONS.items() if opt.question}
    assert {"compute_environment", *local, *cloud} == with_question
    # A group may contain options that were asked earlier; answered options are not asked again.
    assert len(set(cloud)) == len(cloud) and set(local) | set(cloud) == with_question - {"compute_environment"}


@pytest.mark.parametrize("name", sorted(name for name, opt in OPTIONS.items() if opt.asked_when))
def test_conditions_are_satisfiable(name: str) -> None:
    for other, values in OPTIONS[name].asked_when.items():
        opt = OPTIONS[other]
        for value in values:
            if value in (MORE_THAN_ONE, NO_RANGE, GIVEN, None):
                assert opt.kind is int or value != MORE_THAN_ONE
            else:
                assert opt.parse(opt.format(value), other) == value


GPUS = {"distributed_type": "MULTI_GPU", "num_processes": 2}
# What is answered; what the file has then; which of the other questions are asked, and which are not.
SESSIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "activation checkpointing": (
        {**GPUS, "activation_checkpointing": "yes", "activation_checkpointing_offload": "yes"},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        *("use_megatron_lm activation_checkpointing_mode", ""),
    ),
    "selective activation checkpointing": (
        {**GPUS, "activation_checkpointing": "yes", "activation_checkpointing_mode": "selective"},
        {"activation_checkpointing_mode": "selective"},
        *("", "activation_checkpointing_offload"),
    ),
    "mpirun": (
        {
            **{"distributed_type": "MULTI_CPU", "num_machines": 4, "main_process_ip": "36.112.23.24"},
            **{"mpirun_hostfile": "/data/hostfile", "num_processes": 16, "mixed_precision": "bf16"},
        },
        {
            **{"use_cpu": True, "distributed_type": "MULTI_CPU", "main_process_port": 29500, "same_network": True},
            **{"num_processes": 16, "mpirun_config": {"mpirun_ccl": 1, "mpirun_hostfile": "/data/hostfile"}},
        },
        *("main_process_port", "cpu gpu_ids"),
    ),
    "a range of machines needs no ranks": (
        {**GPUS, "main_process_ip": "10.0.0.1", "num_machines": "2:8"},
        {"num_machines": "2:8", "main_process_ip": "10.0.0.1"},
        *("machine_timeout", "machine_rank rdzv_backend"),
    ),
    "a number of machines": (
        {**GPUS, "num_processes": 16, "main_process_ip": "10.0.0.1", "num_machines": "8", "machine_rank": 1},
        {"num_machines": 8, "machine_rank": 1},
        *("machine_timeout rdzv_backend", ""),
    ),
    "DeepSpeed with a file skips its settings": (
        {**GPUS, "use_deepspeed": "yes", "deepspeed_config_file": "ds_config.json", "zero3_init_flag": "yes"},
        {
            **{"deepspeed_config": {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": True}},
            **{"distributed_type": "DEEPSPEED", "mixed_precision": None, "use_deepspeed": None},
        },
        *("", "zero_stage gradient_clipping gradient_accumulation_steps mixed_precision use_fsdp"),
    ),
    "DeepSpeed": (
        {
            **{**GPUS, "use_deepspeed": "yes", "zero_stage": 3, "gradient_accumulation_steps": 4},
            **{"offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"},
        },
        {"gradient_accumulation_steps": None},  # where other tools look for it: in the section
        *("zero3_init_flag", "offload_optimizer_nvme_path activation_checkpointing"),
    ),
    "FSDP": (
        {**GPUS, "use_fsdp": "yes", "fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"distributed_type": "FSDP"},
        "fsdp_sharding_strategy fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap fsdp_reshard_after_forward use_megatron_lm activation_checkpointing",
    ),
    "Megatron": (
        {
            **{"distributed_type": "MULTI_GPU", "use_megatron_lm": "yes", "megatron_lm_tp_degree": 2},
            **{"megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 2, "num_processes": 4},
        },
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {
                **{"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 2},
                **{"megatron_lm_gradient_clipping": 1.0, "megatron_lm_recompute_activations": True},
                **{"megatron_lm_sequence_parallelism": True, "megatron_lm_use_distributed_optimizer": True},
            },
        },
        *("", "activation_checkpointing"),
    ),
    "SageMaker": (
        {"compute_environment": "AMAZON_SAGEMAKER", "iam_role_name": "role", "distributed_type": "DATA_PARALLEL"},
        {"iam_role_name": "role", "distributed_type": "DATA_PARALLEL", "region": "us-east-1", "machine_rank": None},
        *("num_machines", "machine_rank use_fsdp cpu num_processes aws_access_key_id"),
    ),
}


class TestWhatIsAsked:
    def test_one_cpu(self) -> None:
        content, asked = answer({"distributed_type": "NO", "cpu": "yes", "mixed_precision": "bf16"})
        expected = "compute_environment distributed_type debug cpu dynamo_backend use_deepspeed"
        assert asked == [*expected.split(), "activation_checkpointing", "mixed_precision"]
        assert content["use_cpu"] is True and content["num_processes"] == 1 and content["distributed_type"] == "NO"
        assert "fsdp_config" not in content and "deepspeed_config" not in content

    @pytest.mark.parametrize("session", SESSIONS)
    def test_what_follows_from_the_answers(self, session: str) -> None:
        answers, expected, asked_too, not_asked = SESSIONS[session]
        content, asked = answer(answers)
        assert {key: content.get(key) for key in expected} == expected
        assert {*answers, *asked_too.split()} <= {*asked} and not {*not_asked.split()} & {*asked}

    def test_settings_without_a_question_are_kept_and_disabled_engines_dropped(self) -> None:
        known = {
            "max_restarts": 3,
            "fsdp_offload_params": True,
            "megatron_lm_hidden_dropout": 0.5,
            "log_dir": "logs",
            "use_mps_device": True,
        }
        content, _ = answer({"distributed_type": "MULTI_CPU", "num_processes": 2}, known)
        assert content["max_restarts"] == 3 and content["log_dir"] == "logs"
        assert not {"fsdp_config", "megatron_lm_config", "use_mps_device"} & set(content)


def _texts(opt: Option) -> list[str]:
    if opt.choices:
        return list(opt.choices)
    texts = {bool: ["true", "false"], int: ["1", "2", "3"], float: ["0.5", "1"]}.get(opt.kind, ["some_text"])
    return ["0"] if opt.name == "gpu_ids" else texts


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_answers_give_a_file_with_the_same_settings(data: st.DataObject) -> None:
    """The file loads with the settings that were answered, or the error names the contradiction."""
    answers: dict[str, Any] = {}
    for opt in questions(answers):
        choices = flow._choices(opt, answers) or tuple(_texts(opt))
        text = data.draw(st.none() | st.sampled_from(choices), label=opt.name)
        answers[opt.name] = opt.parse(text, opt.name) if text is not None else propose(opt, {}, answers)
        if opt.name == "distributed_type" and answers[opt.name] not in choices:
            answers[opt.name] = choices[0]
    try:
        content = nest(complete(answers, {}))
    except ConfigurationError:
        with pytest.raises(
            ConfigurationError, match="num_processes|machine_rank|contradict|combined|needs|requires|without"
        ):
            complete(answers, {})
        return
    flat = check(resolve(load_groups(), {}, environ={}, config=_as_file(content)))
    engine_answered = {name for name in answers if name.startswith("use_") or name in ("distributed_type", "tpu")}
    for name, value in answers.items():
        if name not in engine_answered and value not in (None, ()):
            assert flat[name] == value, name
    for name in engine_answered - {"distributed_type", "use_parallelism_config"}:
        assert flat[name] == answers[name], name


def _as_file(content: Mapping[str, Any]) -> Any:
    from tempfile import TemporaryDirectory

    from accel_launch.config.read import read_config

    with TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(to_text(path, content))
        return read_config(path)


class TestAsText:
    def test_a_complete_session(self, shell) -> None:
        lines = ["0", "1", "1", "", "NO", "no", "no", "no", "no", "two", "2", "bf16"]
        shell.write("answers.txt", "\n".join(lines) + "\n")
        result = self._run(shell, "config", "--config_file", "c.yaml")
        assert result.returncode == 0, result.stderr
        assert "num_processes: 'two' is not an integer of at least 1" in result.stdout, (
            "asked again after a wrong answer"
        )
        content = yaml.safe_load((shell.folder / "c.yaml").read_text())
        assert (content["distributed_type"], content["num_processes"], content["mixed_precision"]) == (
            "MULTI_CPU",
            2,
            "bf16",
        )
        # A second run with only Enter: the file's values are the defaults, and are kept.
        shell.write("answers.txt", "\n" * 20)
        assert self._run(shell, "config", "--config_file", "c.yaml").returncode == 0
        assert yaml.safe_load((shell.folder / "c.yaml").read_text()) == content

    def _run(self, shell, *words: str) -> Any:
        with (shell.folder / "answers.txt").open() as answers, mock.patch("sys.stdin", answers):
            return shell.call(*words)

    def test_the_input_ends(self, shell) -> None:
        path = shell.write("c.yaml", "num_processes: 3\n")
        shell.write("answers.txt", "0\n")
        result = self._run(shell, "config", "--config_file", "c.yaml")
        assert (
            result.returncode == 2
            and "the input ended at the question for distributed_type; nothing was written" in result.stderr
        )
        assert path.read_text() == "num_processes: 3\n"

    def test_a_broken_file_is_replaced_only_on_demand(self, shell) -> None:
        path = shell.write("c.yaml", "num_proceses: 3\n")
        shell.write("answers.txt", "no\n")
        assert (
            self._run(shell, "config", "--config_file", "c.yaml").returncode == 2
            and path.read_text() == "num_proceses: 3\n"
        )
        shell.write("answers.txt", "yes\n" + "\n" * 30)
        assert self._run(
            shell, "config", "--config_file", "c.yaml"
        ).returncode == 0 and "num_processes" in yaml.safe_load(path.read_text())

    def test_contradicting_answers_can_be_corrected(self, shell) -> None:
        first = ["0", "2", "", "", "", "no", "no", "yes", "3", "1", "", "", "", "", "2", "", "", ""]
        shell.write("answers.txt", "\n".join([*first, "no", ""]))
        result = self._run(shell, "config", "--config_file", "c.yaml")
        assert (
            result.returncode == 2
            and "These answers contradict each other: " in result.stdout
            and not (shell.folder / "c.yaml").exists()
        )

    def test_a_name_that_cannot_be_written_is_refused_at_once(self, shell) -> None:
        result = shell.call("config", "--config_file", "c.toml")
        assert result.returncode == 2 and result.stdout == "" and "ends in .yaml" in result.stderr

    def test_numbers_names_and_choices(self, capsys: pytest.CaptureFixture[str]) -> None:
        for text, expected in (("1\n", "EAGER"), ("inductor\n", "INDUCTOR"), ("99\nno\n", "NO"), ("\n", "TVM")):
            assert TextPrompts(io.StringIO(text)).ask(OPTIONS["dynamo_backend"], "TVM", None) == expected
        assert TextPrompts(io.StringIO("1\n")).ask(OPTIONS["fsdp_version"], 2, None) == 1, (
            "a number that is a choice is no position"
        )
        assert "'99' is not one of NO, EAGER" in capsys.readouterr().out
        assert (
            TextPrompts(io.StringIO("DEEPSPEED\n2\n")).ask(
                OPTIONS["distributed_type"], "NO", ("NO", "MULTI_CPU", "MULTI_GPU")
            )
            == "MULTI_GPU"
        )

    def test_what_no_machine_can_choose_is_not_offered(self) -> None:
        offered: dict[str, tuple[str, ...] | None] = {}

        def ask(opt: Option, proposal: Any, choices: tuple[str, ...] | None) -> Any:
            offered[opt.name] = choices
            return proposal

        ask_all(ask, {"dynamo_backend": "OFI", "distributed_type": "MULTI_TPU"})
        types, backends = offered["distributed_type"], offered["dynamo_backend"]
        assert types is not None and backends is not None
        assert [label(OPTIONS["distributed_type"], kind) for kind in types if "TPU" in kind or kind == "XLA"] == ["TPU"]
        assert "INDUCTOR" in backends and not set(backends) & set(REMOVED_DYNAMO_BACKENDS)

    def test_printed_commands_can_be_typed(self, capsys: pytest.CaptureFixture[str]) -> None:
        kinds = ("NO", "MULTI_CPU", "XLA")
        for text, expected in (
            ("Multi-CPU\n", "MULTI_CPU"),
            ("tpu\n", "XLA"),
            ("no distributed training\n", "NO"),
            ("FSDP\n0\n", "NO"),
        ):
            assert TextPrompts(io.StringIO(text)).ask(OPTIONS["distributed_type"], "NO", kinds) == expected
        assert "'FSDP' is not one of No distributed training, multi-CPU, TPU\n" in capsys.readouterr().out
        answer = TextPrompts(io.StringIO("aws (amazon sagemaker)\n")).ask(
            OPTIONS["compute_environment"], "LOCAL_MACHINE", None
        )
        assert answer == "AMAZON_SAGEMAKER"


@pytest.fixture
def terminal(shell) -> Iterator[pexpect.spawn]:
    """`accel config` on a pseudo-terminal."""
    env = {**os.environ, **shell.env, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    words = ["-m", "accel_launch", "config", "--config_file", "c.yaml"]
    child = pexpect.spawn(
        sys.executable, words, cwd=str(shell.folder), env=env, encoding="utf-8", dimensions=(40, 150), timeout=100
    )
    child.delaybeforesend = 0.2
    yield child
    child.close(force=True)


class TestOnATerminal:
    def test_menus_and_filled_in_lines(self, shell, terminal: pexpect.spawn) -> None:
        for question, keys in (
            ("compute environment", ENTER),
            ("type of machine", DOWN + ENTER),
            ("How many different machines", ENTER),
            ("checked while running", "n"),
            ("Which backend of torch.compile", DOWN + DOWN + DOWN + ENTER),
            ("Which mode", DOWN + UP + ENTER),
            ("single graph", "n"),
            ("Do shapes change", "y"),
            ("repeated blocks", "n"),
            ("DeepSpeed", "n"),
            ("FullySharded", "n"),
            ("Megatron", "n"),
            ("activations be recomputed", "n"),
            ("How many processes", "\x7f2" + ENTER),
            ("mixed precision", DOWN + DOWN + ENTER),
            ("Configuration saved in", ""),
        ):
            terminal.expect(question)
            if keys:
                terminal.send(keys)
        terminal.expect(pexpect.EOF)
        terminal.wait()
        content = yaml.safe_load((shell.folder / "c.yaml").read_text())
        assert (
            content["distributed_type"] == "MULTI_CPU"
            and content["num_processes"] == 2
            and content["mixed_precision"] == "bf16"
        )
        assert (
            content["dynamo_config"]["dynamo_backend"] == "INDUCTOR"
            and content["dynamo_config"]["dynamo_use_dynamic"] is True
        )
        assert terminal.exitstatus == 0

    def test_an_invalid_answer_is_asked_again_and_an_interrupt_writes_nothing(
        self, shell, terminal: pexpect.spawn
    ) -> None:
        path = shell.write("c.yaml", "num_processes: 3\n")
        for question, keys in (
            ("compute environment", ENTER),
            ("type of machine", DOWN + ENTER),
            ("How many different machines", "x" + ENTER),
        ):
            terminal.expect(question)
            terminal.send(keys)
        terminal.expect("neither an integer of at least 1")
        terminal.sendcontrol("c")
        terminal.expect(pexpect.EOF)
        terminal.wait()  # what is still about to end pexpect gives half a second, and raises
        assert terminal.exitstatus == 130 and "Traceback" not in (terminal.before or "")
        assert path.read_text() == "num_processes: 3\n"
