"""`accel config default`, `update`, `show` and `accel env`: what they write and print, and that no file is ever
damaged.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_launch.config import write
from accel_launch.config.read import load_settings
from accel_launch.config.update import update_file
from accel_launch.config.write import write_basic_config, write_file
from accel_state.errors import ConfigurationError


def default_file(shell) -> Path:
    return Path(shell.env["HF_HOME"]) / "accel" / "default_config.yaml"


def fails(shell, *words: str | Path, **env: str) -> str:
    result = shell.call("config", *words, **env)
    assert result.returncode == 2 and "Traceback" not in result.stderr, (
        result.returncode,
        result.stdout,
        result.stderr,
    )
    assert result.stderr.startswith("accel config: error: ") and result.stderr.count("\n") == 1
    return result.stderr


class TestDefault:
    def test_env_describes_this_machine(self, shell) -> None:
        result = shell.call("config", "default", "--mixed_precision", "bf16")
        path = default_file(shell)
        assert (result.returncode, result.stdout) == (0, f"Configuration saved in {path}\n")
        content = yaml.safe_load(path.read_text())
        assert (
            content["mixed_precision"] == "bf16" and content["num_processes"] >= 1 and list(content) == sorted(content)
        )
        assert content["distributed_type"] == ("NO" if content["num_processes"] == 1 else "MULTI_GPU")
        shell.write("s.py", "import os; print(os.environ['ACCELERATE_MIXED_PRECISION'])")
        assert shell.accel("launch", "--num_processes", "1", "s.py").stdout == "bf16\n"

    def test_json_and_other_names(self, shell) -> None:
        assert shell.call("config", "default", "--config_file", "c.json").returncode == 0
        assert json.loads((shell.folder / "c.json").read_text())["compute_environment"] == "LOCAL_MACHINE"
        assert "ends in .yaml, .yml or .json" in fails(shell, "default", "--config_file", "c.toml")
        assert not (shell.folder / "c.toml").exists()

    def test_write_basic_config(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        assert write_basic_config("fp16") == tmp_path / "hf" / "accel" / "default_config.yaml"
        assert write_basic_config("bf16", tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
        assert json.loads((tmp_path / "a" / "b.json").read_text())["mixed_precision"] == "bf16"
        before = (tmp_path / "a" / "b.json").read_bytes()
        assert write_basic_config("no", tmp_path / "a" / "b.json") is False
        assert "exists already and was not changed" in capsys.readouterr().err
        assert (tmp_path / "a" / "b.json").read_bytes() == before
        with pytest.raises(ConfigurationError, match="mixed_precision: 'fp7'"):
            write_basic_config("fp7", tmp_path / "never.yaml")
        assert not (tmp_path / "never.yaml").exists()


class TestUpdate:
    OLD = "# of the old days\nfp16: true\nnum_processes: 2  # both\ndynamo_backend: EAGER\nuse_mps_device: false\n"

    def test_old_keys_are_renamed(self, shell) -> None:
        path = shell.write("old.yaml", self.OLD)
        result = shell.call("config", "update", "--config_file", path)
        assert result.returncode == 0, result.stderr
        content = yaml.safe_load(path.read_text())
        assert content["mixed_precision"] == "fp16" and content["num_processes"] == 2
        assert content["dynamo_config"] == {"dynamo_backend": "EAGER"} and not {
            "fp16",
            "dynamo_backend",
            "use_mps_device",
        } & set(content)
        assert content["machine_rank"] == 0 and "use_cpu" not in content, "what the file leaves to the machine stays so"
        assert f"{path}, line 2: fp16 is now a value of mixed_precision\n" in result.stdout
        assert f"comments are not kept; the original file was copied to {path}.bak\n" in result.stdout
        assert (shell.folder / "old.yaml.bak").read_text() == self.OLD
        again = shell.call("config", "update", "--config_file", path)
        assert again.returncode == 0 and "comments" not in again.stdout, "the new file has none"
        assert sorted(os.listdir(shell.folder)) == ["old.yaml", "old.yaml.bak"]

    def test_a_file_of_the_reference_is_converted(self, shell) -> None:
        reference = Path(shell.env["HF_HOME"]) / "accelerate" / "default_config.yaml"
        reference.parent.mkdir(parents=True)
        reference.write_text("num_processes: 3\n")
        assert "num_processes: 3 in " + str(reference) in shell.call("config", "show").stdout
        assert shell.call("config", "update").returncode == 0
        assert reference.read_text() == "num_processes: 3\n", "it is not ours to change"
        assert yaml.safe_load(default_file(shell).read_text())["num_processes"] == 3
        assert f"num_processes: 3 in {default_file(shell)}" in shell.call("config", "show").stdout

    def test_an_earlier_copy_stays(self, shell) -> None:
        path = shell.write("c.yaml", "# one\nnum_processes: 2\nuse_mps_device: true\n")
        shell.write("c.yaml.bak", "precious")
        notes = update_file(path, shell.folder / "c.json")
        assert json.loads((shell.folder / "c.json").read_text())["num_processes"] == 2
        assert f"comments are not kept; they are in {path}" in notes
        update_file(path, path)
        assert (shell.folder / "c.yaml.bak").read_text() == "precious"
        assert (shell.folder / "c.yaml.bak1").read_text().startswith("# one\n")
        assert (
            f"{path}, line 3: use_mps_device is left out: the GPU of an Apple machine is detected automatically"
            in notes
        )

    def test_the_file_that_the_environment_names(self, shell) -> None:
        path = shell.write("c.yaml", "fp16: true\n")
        assert shell.call("config", "update", ACCELERATE_CONFIG_FILE=str(path)).returncode == 0
        assert "mixed_precision: fp16" in path.read_text()
        assert f"- Configuration file: {path}" in shell.call("env", ACCELERATE_CONFIG_FILE=str(path)).stdout
        before = path.read_text()
        assert "exists already" in fails(shell, "default", ACCELERATE_CONFIG_FILE=str(path))
        assert path.read_text() == before

    def test_nothing_to_update(self, shell) -> None:
        assert "there is no configuration file at" in fails(shell, "update")
        assert "nowhere.yaml: No such file" in fails(shell, "update", "--config_file", "nowhere.yaml")


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".yaml", "~nobody-of-this-name/x.yaml", "a/" * 3000 + "x.yaml"], ids=["long", "nobody", "deep"]
)
def test_invalid_file_names(shell, name: str) -> None:
    for words in ([], ["update"], ["show"], ["default"]):
        result = shell.call("config", *words, "--config_file", name)
        if words == ["default"] and name.startswith("~"):
            assert result.returncode == 0  # as the shell itself takes it
            continue
        assert result.returncode == 2 and result.stderr.splitlines()[-1].startswith("accel config: error: ")
        assert "Traceback" not in result.stderr
    assert shell.call("launch", "--config_file", name, "s.py").returncode == 2
    assert shell.call("config", "show", HF_HOME=name).returncode == 0


class TestShow:
    def test_every_source(self, shell) -> None:
        shell.write("c.yaml", "num_processes: 2\nmixed_precision: fp16\nnum_machines: 1\n")
        words = ["config", "show", "--config_file", "c.yaml", "--num_processes", "4", "--json"]
        shown = json.loads(shell.call(*words, ACCELERATE_MIXED_PRECISION="bf16").stdout)["settings"]
        origin = {
            name: (shown[name]["value"], shown[name]["source"])
            for name in ("num_processes", "mixed_precision", "num_machines", "role")
        }
        assert origin == {
            "num_processes": (4, "command line"),
            "mixed_precision": ("bf16", "environment"),
            "num_machines": (1, "config file"),
            "role": ("default", "default"),
        }
        assert shown["num_machines"]["where"] == "num_machines: 1 in c.yaml, line 3"
        table = shell.call(*words[:-1], ACCELERATE_MIXED_PRECISION="bf16").stdout
        assert (
            "--num_processes 4" in table
            and "ACCELERATE_MIXED_PRECISION=bf16" in table
            and "num_machines: 1 in c.yaml, line 3" in table
        )
        assert "FSDP (not in use)" in table and "FSDP\n" in shell.call("config", "show", "--use_fsdp").stdout

    def test_notes_and_secrets(self, shell) -> None:
        shell.write("c.yaml", "ipex_config: {ipex: true}\nfp16: true\n")
        result = shell.call("config", "show", "--config_file", "c.yaml", AWS_SECRET_ACCESS_KEY="hush")
        assert (
            "note: c.yaml, line 2: fp16 is now" in result.stdout
            and "note: ipex_config.ipex: true in c.yaml, line 1" in result.stdout
        )
        assert "hush" not in result.stdout and "(hidden)" in result.stdout
        assert "hush" not in shell.call("config", "show", "--json", AWS_SECRET_ACCESS_KEY="hush").stdout

    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["shwo"], ["'shwo' is not a subcommand of accel config. Did you mean show?"]),
            (["show", "--num_proceses", "2"], ["--num_proceses is not an option. Did you mean --num_processes?"]),
            (["show", "--num_processes"], ["--num_processes", "expected one argument"]),
            (["show", "left.yaml"], ["unrecognized arguments: left.yaml"]),
        ],
    )
    def test_errors_name_the_problem(self, shell, words: list[str], parts: list[str]) -> None:
        message = fails(shell, *words)
        for part in parts:
            assert part in message


class TestWriting:
    def test_a_link_stays_a_link_and_rights_stay(self, tmp_path: Path) -> None:
        real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
        real.write_text("num_processes: 1\n")
        real.chmod(0o640)
        link.symlink_to(real)
        write_file(link, {"num_processes": 2})
        assert (
            link.is_symlink()
            and real.read_text() == "num_processes: 2\n"
            and stat.S_IMODE(real.stat().st_mode) == 0o640
        )

    @pytest.mark.parametrize("broken", ["fsync", "replace"])
    def test_a_full_disk_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
    ) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("num_processes: 1\n")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(write.os, broken, full)
        with pytest.raises(ConfigurationError, match="No space left"):
            write_file(path, {"num_processes": 2})
        monkeypatch.undo()
        assert path.read_text() == "num_processes: 1\n" and os.listdir(tmp_path) == ["c.yaml"]

    def test_invalid_content_is_not_written(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        with pytest.raises(ConfigurationError, match="num_proceses is not a known key"):
            write_file(path, {"num_proceses": 2})
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("suffix", [".yaml", ".json"])
    def test_any_text_round_trips(self, tmp_path: Path, suffix: str) -> None:
        content = {
            "additional_args": {"a": "\ud800", "b": "\N{GREEK SMALL LETTER BETA}"},
            "compute_environment": "AMAZON_SAGEMAKER",
        }
        write_file(tmp_path / f"c{suffix}", content)
        assert (
            load_settings({"config_file": str(tmp_path / f"c{suffix}")}, environ={})["sagemaker_additional_args"]
            == content["additional_args"]
        )

    def test_output_path_is_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").mkdir()
        with pytest.raises(ConfigurationError, match="cannot be written"):
            write_file(tmp_path / "c.yaml", {"num_processes": 2})
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="cannot be written"):
            write_file(tmp_path / "file" / "c.yaml", {"num_processes": 2})


class TestEnv:
    def test_it_prints_versions_devices_and_configuration(self, shell) -> None:
        shell.call("config", "default")
        text = shell.call("env", ACCELERATE_LOG_LEVEL="info", OMP_NUM_THREADS="1").stdout
        for part in (
            "- accel-launch version: ",
            "- PyTorch version: ",
            "- Python version: ",
            "\t- compute_environment: LOCAL_MACHINE",
        ):
            assert part in text
        assert "\t- ACCELERATE_LOG_LEVEL: info" in text and f"- Configuration file: {default_file(shell)}" in text

    def test_json_and_hidden_secrets(self, shell) -> None:
        facts = json.loads(shell.call("env", "--json", ACCELERATE_API_KEY="hush").stdout)
        assert facts["Environment"]["ACCELERATE_API_KEY"] == "(hidden)" and facts["Configuration file"] == "none"
        assert facts["Python executable"] == sys.executable

    def test_env_reports_a_broken_file(self, shell) -> None:
        path = shell.write("c.yaml", "num_proceses: 2\n")
        facts = json.loads(shell.call("env", "--json", "--config_file", path).stdout)
        assert (
            facts["Configuration"] == {"num_proceses": 2}
            and "Did you mean num_processes?" in facts["Configuration error"]
        )

    def test_without_torch(self, shell) -> None:
        shell.write("torch.py", "raise ImportError('broken wheel')")
        result = shell.python(
            """
            import sys
            sys.path.insert(0, '.')
            from accel_launch.cli import env_main
            sys.exit(env_main([]))
            """
        )
        assert result.returncode == 0 and "- PyTorch: cannot be imported: broken wheel" in result.stdout


def test_a_closed_stdout_is_not_an_error(shell) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # it has closed the pipe before the first output
    try:
        result = subprocess.run(
            [sys.executable, "-m", "accel_launch", "config", "show"],
            cwd=shell.folder,
            env=shell.env,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=110,
            check=False,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_console_scripts(shell) -> None:
    code = (
        "import sys; from accel_launch.cli import config_main, env_main; print(config_main(['show']), "
        "env_main(['--nope']))"
    )
    result = shell.python(code)
    assert result.stdout.endswith("0 2\n") and "--nope is not an option" in result.stderr


def test_options_of_every_kind_from_python(shell) -> None:
    shell.write(
        "s.py",
        "import os; print(*(os.environ.get(name) for name in ('FSDP_OFFLOAD_PARAMS', 'FSDP_VERSION', "
        "'AWS_SECRET_ACCESS_KEY')))",
    )
    result = shell.python(
        """
        from accel_launch import launch
        options = {"use_fsdp": True, "fsdp_offload_params": True, "fsdp_version": 2, "cpu": True}
        options["aws_secret_access_key"] = "hush"
        assert launch("s.py", num_processes=1, **options) == 0
        pod = {"tpu": True, "tpu_cluster": True, "vm": ["one", "two"], "tpu_zone": "z", "main_process_port": None}
        assert launch("s.py", dry_run=True, num_processes=8, **pod) == 0
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("true 2 hush\n") and "hush" not in result.stdout[12:]
    assert "gcloud compute" in result.stdout and "two" in result.stdout


class TestStreams:
    """However the command's streams are, it ends with a message."""

    def run(self, shell, words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        command = f"exec {shlex.quote(sys.executable)} -m accel_launch {words}"
        return subprocess.run(
            ["bash", "-c", command],
            cwd=shell.folder,
            env={**shell.env, **env},
            capture_output=True,
            timeout=110,
            check=False,
        )

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
    @pytest.mark.parametrize("words", ["--help", "config show"])
    def test_a_full_disk(self, shell, words: str) -> None:
        result = self.run(shell, f"{words} > /dev/full")
        assert (
            result.returncode == 2 and result.stderr.count(b"\n") == 1 and b"No space left on device" in result.stderr
        )

    def test_no_output(self, shell) -> None:
        assert self.run(shell, "config show >&-").returncode == 0

    def test_no_input(self, shell) -> None:
        for end in ("<&-", "</dev/null"):
            result = self.run(shell, f"config --config_file c.yaml {end}")
            assert (
                result.returncode == 2 and b"the input ended at the question for compute_environment" in result.stderr
            )

    def test_bytes_that_are_not_text(self, shell) -> None:
        shell.folder.joinpath("answers").write_bytes(b"\xff\n\n\n\xff\n" + b"\n" * 20)
        result = self.run(shell, "config --config_file c.yaml < answers")
        assert (
            result.returncode == 0
            and b"Traceback" not in result.stderr
            and b"contains bytes that are not text" in result.stdout
        )

    def test_a_terminal_with_another_encoding(self, shell) -> None:
        shell.write("\N{GREEK SMALL LETTER ALPHA}.yaml", "role: \N{GREEK SMALL LETTER BETA}\n")
        result = self.run(
            shell, "config show --config_file \N{GREEK SMALL LETTER ALPHA}.yaml", PYTHONIOENCODING="ascii"
        )
        assert result.returncode == 0 and rb"role: \u03b2 in \u03b1.yaml, line 1" in result.stdout
