"""`accel config`: only what follows from earlier answers is asked; as text, and on a real terminal with arrow keys."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_launch.config.write import declared, nest, to_text
from accel_launch.questionnaire import flow
from accel_launch.questionnaire.flow import TextPrompts, ask_all, complete, label, propose, questions
from accel_state.enums import REMOVED_DYNAMO_BACKENDS
from accel_state.errors import ConfigurationError
from accel_state.options import Option, check, load_groups, resolve
from accel_state.options.declaration import GIVEN, MORE_THAN_ONE, NO_RANGE

pexpect = pytest.importorskip("pexpect", reason="a terminal to answer in needs pexpect")

OPTIONS = declared()
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


class TestWhatIsAsked:
    def test_one_cpu(self) -> None:
        content, asked = answer({"distributed_type": "NO", "cpu": "yes", "mixed_precision": "bf16"})
        assert asked == [
            "compute_environment",
            "distributed_type",
            "debug",
            "cpu",
            "dynamo_backend",
            "use_deepspeed",
            "activation_checkpointing",
            "mixed_precision",
        ]
        assert content["use_cpu"] is True and content["num_processes"] == 1 and content["distributed_type"] == "NO"
        assert "fsdp_config" not in content and "deepspeed_config" not in content

    def test_activation_checkpointing_of_models_that_are_not_sharded(self) -> None:
        answers = {"distributed_type": "MULTI_GPU", "activation_checkpointing": "yes", "num_processes": 2}
        content, asked = answer({**answers, "activation_checkpointing_offload": "yes"})
        assert content["activation_checkpointing"] is True and content["activation_checkpointing_offload"] is True
        _, asked = answer({**answers, "activation_checkpointing_mode": "selective"})
        assert "activation_checkpointing_offload" not in asked
        for engine in ("use_deepspeed", "use_fsdp", "use_megatron_lm"):
            _, asked = answer({"distributed_type": "MULTI_GPU", engine: "yes", "num_processes": 2})
            assert "activation_checkpointing" not in asked

    def test_mpirun_as_documented(self) -> None:
        content, asked = answer(
            {
                "distributed_type": "MULTI_CPU",
                "num_machines": 4,
                "main_process_ip": "36.112.23.24",
                "mpirun_hostfile": "/data/hostfile",
                "num_processes": 16,
                "mixed_precision": "bf16",
            }
        )
        assert "cpu" not in asked and "gpu_ids" not in asked
        assert content["mpirun_config"] == {"mpirun_ccl": 1, "mpirun_hostfile": "/data/hostfile"}
        assert (
            content["use_cpu"] is True
            and content["distributed_type"] == "MULTI_CPU"
            and content["main_process_port"] == 29500
        )
        assert content["same_network"] is True and content["num_processes"] == 16

    def test_ray_finds_the_machines_itself(self) -> None:
        answers = {"distributed_type": "MULTI_GPU", "num_machines": 2, "ray": "10.0.0.1:6379", "num_processes": 16}
        content, asked = answer({**answers, "ray_runtime_env": '{"working_dir": "."}'})
        assert not {"machine_rank", "main_process_ip", "rdzv_backend", "mpirun_hostfile"} & set(asked)
        expected = {"ray_address": "10.0.0.1:6379", "ray_runtime_env": {"working_dir": "."}}
        assert content["ray_config"] == expected and content["num_machines"] == 2 and "ft" in asked
        assert content["num_processes"] == 16 and "num_replicas" not in asked

    def test_replicas_on_ray_have_no_engine_and_no_number_of_processes(self) -> None:
        answers = {"distributed_type": "MULTI_GPU", "num_machines": 2, "ray": "auto", "ft": "yes", "num_replicas": 8}
        content, asked = answer(answers)
        assert content["ft"] is True and content["ft_config"] == {"num_replicas": 8}
        assert not {"num_processes", "use_deepspeed", "use_fsdp", "use_megatron_lm"} & set(asked)
        assert content.get("num_processes") is None

    def test_a_range_of_machines_needs_no_ranks(self) -> None:
        answers = {"distributed_type": "MULTI_GPU", "main_process_ip": "10.0.0.1", "num_processes": 16}
        content, asked = answer({**answers, "num_machines": "2:8"})
        assert content["num_machines"] == "2:8" and content["main_process_ip"] == "10.0.0.1"
        assert {"main_process_ip", "machine_timeout"} <= {*asked} and not {"machine_rank", "rdzv_backend"} & {*asked}
        _, asked = answer({**answers, "num_machines": "8", "machine_rank": 1})
        assert {"machine_rank", "rdzv_backend"} <= {*asked}

    def test_deepspeed_with_a_file_skips_its_settings(self) -> None:
        answers = {
            "distributed_type": "MULTI_GPU",
            "use_deepspeed": "yes",
            "deepspeed_config_file": "ds_config.json",
            "zero3_init_flag": "yes",
        }
        content, asked = answer({**answers, "num_processes": 4})
        assert content["deepspeed_config"] == {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": True}
        assert (
            content["distributed_type"] == "DEEPSPEED"
            and "mixed_precision" not in content
            and "use_deepspeed" not in content
        )
        assert not {
            "zero_stage",
            "gradient_clipping",
            "gradient_accumulation_steps",
            "mixed_precision",
            "use_fsdp",
        } & set(asked)

    def test_deepspeed_by_questions(self) -> None:
        answers = {
            "distributed_type": "MULTI_GPU",
            "use_deepspeed": "yes",
            "zero_stage": 3,
            "offload_param_device": "nvme",
        }
        content, asked = answer(
            {**answers, "offload_param_nvme_path": "/nvme", "num_processes": 2, "gradient_accumulation_steps": 4}
        )
        section = content["deepspeed_config"]
        assert (
            section["zero_stage"] == 3
            and section["offload_param_nvme_path"] == "/nvme"
            and section["gradient_accumulation_steps"] == 4
        )
        assert "gradient_accumulation_steps" not in content, "where other tools look for it"
        assert "offload_optimizer_nvme_path" not in asked

    def test_fsdp(self) -> None:
        answers = {
            "distributed_type": "MULTI_GPU",
            "use_fsdp": "yes",
            "fsdp_version": 1,
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        }
        content, asked = answer({**answers, "num_processes": 2})
        assert content["distributed_type"] == "FSDP" and content["fsdp_config"]["fsdp_min_num_params"] == 100_000_000
        assert "fsdp_transformer_layer_cls_to_wrap" not in asked and "fsdp_reshard_after_forward" not in asked
        assert "fsdp_sharding_strategy" in asked and "use_megatron_lm" not in asked

    def test_megatron_as_documented(self) -> None:
        answers = {
            "distributed_type": "MULTI_GPU",
            "use_megatron_lm": "yes",
            "megatron_lm_tp_degree": 2,
            "megatron_lm_pp_degree": 2,
        }
        content, _ = answer(
            {**answers, "megatron_lm_num_micro_batches": 2, "num_processes": 4, "mixed_precision": "bf16"}
        )
        assert content["megatron_lm_config"] == {
            "megatron_lm_gradient_clipping": 1.0,
            "megatron_lm_num_micro_batches": 2,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_recompute_activations": True,
            "megatron_lm_sequence_parallelism": True,
            "megatron_lm_tp_degree": 2,
            "megatron_lm_use_distributed_optimizer": True,
        }
        assert content["distributed_type"] == "MEGATRON_LM"

    def test_sagemaker(self) -> None:
        content, asked = answer(
            {"compute_environment": "AMAZON_SAGEMAKER", "iam_role_name": "role", "distributed_type": "DATA_PARALLEL"}
        )
        assert not {"machine_rank", "use_fsdp", "cpu", "num_processes"} & set(asked) and "num_machines" in asked
        assert (
            content["iam_role_name"] == "role"
            and content["distributed_type"] == "DATA_PARALLEL"
            and content["region"] == "us-east-1"
        )
        assert "machine_rank" not in content and not any("key" in key for key in content)

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

    def test_contradicting_answers(self) -> None:
        with pytest.raises(ConfigurationError, match="not a multiple of"):
            answer(
                {
                    "distributed_type": "MULTI_GPU",
                    "use_megatron_lm": "yes",
                    "megatron_lm_tp_degree": 3,
                    "num_processes": 2,
                }
            )


def _texts(opt: Option) -> list[str]:
    if opt.choices:
        return list(opt.choices)
    texts = {bool: ["true", "false"], int: ["1", "2", "3"], float: ["0.5", "1"]}.get(opt.kind, ["some_text"])
    special = {"gpu_ids": ["0"], "ray": ["auto"], "ray_runtime_env": ['{"working_dir": "."}']}
    return special.get(opt.name, texts)


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
        return shell.python(
            f"""
            import sys
            from accel_launch.cli import main
            sys.stdin = open("answers.txt")
            sys.exit(main({list(words)!r}))
            """
        )

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
        result = shell.accel("config", "--config_file", "c.toml")
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

    def test_an_invalid_answer_is_asked_again(self, terminal: pexpect.spawn) -> None:
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

    def test_interrupt_writes_nothing(self, shell, terminal: pexpect.spawn) -> None:
        path = shell.write("c.yaml", "num_processes: 3\n")
        terminal.expect("compute environment")
        terminal.sendcontrol("c")
        terminal.expect(pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 130 and "Traceback" not in (terminal.before or "")
        assert path.read_text() == "num_processes: 3\n"
