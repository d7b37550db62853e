"""The memory estimator: the numbers of its documentation, and those of real tensors."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel.estimate import (
    ModelSize,
    estimate_training,
    estimate_training_usage,
    measure_activations,
    model_size,
)
from accel_bigmodel.estimate.__main__ import main
from accel_bigmodel.estimate.command import run
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.imports import is_package_available

MB = 2**20


# The attention mask of Transformers 4 depends on values, and "accel estimate" says so.
needs_transformers_5 = pytest.mark.skipif(
    not is_package_available("transformers", min_version="5.0"), reason="measures models of Transformers 5"
)


@pytest.fixture
def bert_cased(tmp_path):
    """The configuration of bert-base-cased, which no weights belong to."""
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig(vocab_size=28996, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_the_tables_for_bert_base_cased(bert_cased, capsys) -> None:
    """The embeddings must not be split: 29,510 vectors of 768 in float32, their norm, and two buffers of positions."""
    size = model_size(bert_cased)
    assert size.largest_layer == (29_510 + 2) * 768 * 4 + 2 * 512 * 8 == 90_669_056
    assert run([bert_cased, "--training", "--dtypes", "float32", "float16", "int8", "int4"]) == 0
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    assert rows[0] == ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    assert rows[2:6] == [
        ["float32", "86.47 MiB", "413.18 MiB", "1.61 GiB"],
        ["float16", "43.23 MiB", "206.59 MiB", "826.36 MiB"],
        ["int8", "21.62 MiB", "103.29 MiB", "413.18 MiB"],
        ["int4", "10.81 MiB", "51.65 MiB", "206.59 MiB"],
    ]
    assert rows[6][-2:] == ["Optimizer step", "Highest"]
    assert rows[8:10] == [
        ["float32", "413.18 MiB", "413.18 MiB", "826.36 MiB", "1.61 GiB", "1.61 GiB"],
        ["float16", "413.18 MiB", "619.77 MiB", "826.36 MiB", "826.36 MiB", "826.36 MiB"],
    ]
    assert rows[10][:2] == ["strategy", "Weights"]
    with pytest.raises(ConfigurationError, match="'int8' is not one of"):
        estimate_training_usage(size.total, "int8")


@needs_transformers_5
def test_bytes_of_everything(tmp_path, capsys) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    pytest.importorskip("transformers").BertConfig(vocab_size=100, **sizes).save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--tp_size", "2", "--batch_size", "2", "--sequence_length", "16"]
    assert run([*arguments, "--json", "--num_processes", "4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == model_size(str(tmp_path)).parameters and answer["source"] == "transformers"
    assert list(answer["dtypes"]) == ["float32", "float16", "bfloat16", "float8", "int8", "int4"]
    assert answer["dtypes"]["float8"]["total"] == answer["dtypes"]["float32"]["total"] // 4
    per_process = answer["training_per_process"]
    assert list(per_process) == ["ddp", "fsdp", "zero1", "zero2", "zero3"]
    assert per_process["ddp"]["weights"] == 2 * per_process["zero3"]["weights"] and per_process["ddp"]["activations"]
    assert run([*arguments, "--dtypes", "float32"]) == 0
    title = "2 process(es); adamw, float32 weights; mixed precision: no; tensor parallel: 2; 2 sample(s) of 16 tokens"
    assert title in capsys.readouterr().out


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 6,
}
LLAVA = {"model_type": "llava", "text_config": LLAMA, "vision_config": CLIP_VISION}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 101}


def _with(config: dict, **settings: object) -> dict:
    """A configuration with settings; those named like a part of it are for that part."""
    return {**config, **{k: {**config[k], **v} if k in config else v for k, v in settings.items()}}  # type: ignore[dict-item]


def _plain_bytes(config: dict) -> tuple[int, int]:
    """The values and float32 bytes of a plain model of a configuration that names no dtype."""
    import transformers

    settings = {key: value for key, value in config.items() if key != "model_type"}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(config["model_type"], **settings))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in tensors)
    return sum(item.numel() for item in model.parameters()), sum(item.nbytes for item in tensors)


@needs_transformers_5
@pytest.mark.parametrize(
    ("plain", "settings"),
    [
        *[(LLAMA, {key: dtype}) for key in ("dtype", "torch_dtype") for dtype in ("bfloat16", "float16", "float32")],
        *[(LLAMA, {"dtype": dtype}) for dtype in ("float64", "auto", "float8_e4m3fn", "torch.bfloat16", None)],
        (T5, {"torch_dtype": "bfloat16"}),  # has modules that stay in float32
        (LLAVA, {"dtype": "bfloat16"}),
        (LLAVA, {"text_config": {"torch_dtype": "bfloat16"}}),
        (LLAVA, {"dtype": "float16", "text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}}),
        (LLAMA, {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}),
        (LLAMA, {"dtype": "float16", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}),
        (LLAMA, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
    ],
)
def test_the_dtype_of_a_configuration_changes_no_row(tmp_path, capsys, plain, settings) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_with(plain, **settings)))
    parameters, total = _plain_bytes(plain)
    assert run([str(tmp_path), "--json", "--training"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == parameters
    assert {name: row["total"] for name, row in answer["dtypes"].items()} == {
        "float32": total,
        "float16": total // 2,
        "bfloat16": total // 2,
        "float8": total // 4,
        "int8": total // 4,
        "int4": total // 8,
    }
    assert answer["dtypes"]["bfloat16"]["training_adam"] == 4 * (total // 2)
    assert answer["training_stages"]["float16"]["model"] == total
    if plain is not T5:
        # q and o, k and v, three of the MLP, two norms: a block of the text model is the largest layer.
        block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
        assert answer["dtypes"]["float32"]["largest_layer"] == 4 * block


@needs_transformers_5
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_activations_are_measured_in_float32(tmp_path, monkeypatch, dtype) -> None:
    import transformers

    from accel_bigmodel.estimate.activations import activations_of_config

    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    expected = activations_of_config(config, 2, 8)
    config.write_text(json.dumps({**LLAMA, "dtype": dtype}))
    assert activations_of_config(config, 2, 8) == expected
    # A model's own code may choose a dtype.
    build = transformers.AutoModel.from_config
    monkeypatch.setattr(transformers.AutoModel, "from_config", lambda *args, **kwargs: build(*args, **kwargs).half())
    assert activations_of_config(config, 2, 8) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_model_of_timm_counts_in_float32_too(monkeypatch, dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 5)
            self.tied = self.stem
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("index", torch.zeros(7, dtype=torch.int64))

    created = types.SimpleNamespace(create_model=lambda name, pretrained: Model().to(dtype))
    monkeypatch.setitem(sys.modules, "timm", created)
    size = model_size("timm/some_model", "timm")
    assert (size.parameters, size.total, size.largest_layer) == (45, 4 * 48 + 7 * 8, 4 * 45)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    ],
)
def test_floating_headers_count_in_float32(tmp_path, dtype) -> None:
    save_file(
        {"h.0.w": torch.zeros(6, 4).to(dtype), "ids": torch.zeros(1, 9, dtype=torch.int32)}, tmp_path / "m.safetensors"
    )
    size = model_size(str(tmp_path))
    assert (size.total, size.largest_layer, size.total_in("int8")) == (4 * 24 + 36, 4 * 24, 24 + 9)


@pytest.mark.parametrize(
    "packed",
    [
        {"h.0.qweight": torch.zeros(8, 16, dtype=torch.int32)},  # GPTQ, AWQ
        {"h.0.weight": torch.zeros(64, 1, dtype=torch.uint8)},  # 4 bits of bitsandbytes
        {"h.0.weight": torch.zeros(8, 16, dtype=torch.int8)},  # 8 bits of bitsandbytes
        {"h.0.blocks": torch.zeros(4, 8, 2, 16, dtype=torch.uint8)},  # MXFP4
    ],
)
def test_headers_of_quantized_weights_are_refused(tmp_path, packed) -> None:
    """They do not tell how many values an element packs, so every row would be wrong."""
    save_file({"embed.weight": torch.zeros(100, 16), **packed}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"h.0.\w+ is quantized \([UI]\d+\).*--library_name transformers"):
        model_size(str(tmp_path))


def test_strategies_that_are_asked_for(checkpoint, capsys) -> None:
    """By hand: 179 values, of which 11 in vectors, in float32; the largest layer has 288 bytes."""
    names = ["fsdp", "shard_grad_op", "no_shard", "hybrid_shard", "fsdp2"]
    words = [str(checkpoint), "--num_processes", "4"]
    assert run([*words, "--json", "--replicas", "2", "--strategy", *names]) == 0
    said = json.loads(capsys.readouterr().out)["training_per_process"]
    assert list(said) == names
    for name, one in said.items():
        own = 4 * 179 if name == "no_shard" else 2 * 179
        assert (one["weights"], one["gradients"], one["optimizer"]) == (own, own, 2 * own)
    assert [said[name]["buffers"] for name in names] == [3 * 288, 4 * 179 + 288, 0, 3 * 288, 3 * 288]
    assert run([*words, "--json", "--tp_size", "2", "--strategy", "fsdp2"]) == 0
    shared = json.loads(capsys.readouterr().out)["training_per_process"]["fsdp2"]
    assert shared["weights"] == 4 * ((179 - 11) // 2 + 11) // 2
    assert run([*words, "--dp_replicate_size", "2", "--strategy", "hybrid_shard"]) == 0
    assert "4 process(es); adamw, float32 weights; mixed precision: no; 2 copies" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="replicas=3.*num_processes / tensor_parallel = 4 / 2 = 2"):
        run([*words, "--tp_size", "2", "--replicas", "3"])


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint in two shards, with an index."""
    folder = tmp_path / "shards"
    folder.mkdir()
    first = {
        "embed.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
        "h.0.w": torch.zeros(8, 8),
        "h.0.b": torch.zeros(8),
    }
    second = {"h.1.w": torch.zeros(8, 8), "positions": torch.zeros(3, dtype=torch.int64)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    names = {name: "model-00001-of-00002.safetensors" for name in first} | {
        name: "model-00002-of-00002.safetensors" for name in second
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_headers_of_files_are_enough(checkpoint) -> None:
    expected = ModelSize("", "safetensors", 40 + 72 + 64 + 3, 4 * (40 + 72 + 64) + 24, 4 * 72, "h.0", whole=8 + 3)
    for name in (checkpoint, checkpoint / "model.safetensors.index.json"):
        size = model_size(str(name))
        assert vars(size) == {**vars(expected), "name": str(name)}
    one = model_size(str(checkpoint / "model-00002-of-00002.safetensors"))
    assert (one.parameters, one.total) == (67, 4 * 64 + 24)


def test_no_weight_is_read(tmp_path) -> None:
    """The file has a header, and behind it a hole of 40 GB, which takes no space and would take minutes to read."""
    size = 40_000_000_000
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert model_size(str(tmp_path / "model.safetensors")).total == size


PROGRAM = """
import sys
from accel_bigmodel.estimate.__main__ import main
codes = []
for name in sys.argv[1:]:
    sys.argv[1:] = [name, "--json"]
    codes.append(main())
print(codes)
"""


def estimated(address: str, cache: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """What the program says of repositories, in a process of its own: huggingface_hub reads variables once."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE" and "proxy" not in k.lower()}
    env |= {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM, *names]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


@contextlib.contextmanager
def hub(answers):
    """A server that answers as the Hub does: (status, error code) by the repository's name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            status, code = next((answer for name, answer in answers.items() if name in self.path), (500, ""))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args):
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_the_hub_says_is_passed_on(tmp_path) -> None:
    with hub({"me/private": (404, "RepoNotFound"), "me/gated": (403, "GatedRepo")}) as address:
        done = estimated(address, tmp_path, "me/private", "me/gated")
    assert done.stdout == "[2, 2]\n"
    assert "the Hub has no repository 'me/private', or it is private" in done.stderr
    assert "'me/gated' is gated: request access on its page" in done.stderr


def test_without_a_connection_it_neither_retries_nor_warns(tmp_path) -> None:
    """One line with the next step; what is in the cache is found."""
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    save_file({"w": torch.zeros(5, 2)}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # without a listener
        begin = time.monotonic()
        done = estimated(f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path, "nobody/nothing", "me/tiny")
    content, codes = done.stdout.rsplit("\n", 2)[:2]
    assert codes == "[2, 0]" and json.loads(content)["dtypes"]["float32"]["total"] == 40
    (line,) = done.stderr.splitlines()
    assert "'nobody/nothing' is not in the local cache, and the Hub cannot be reached" in line and "refused" in line
    assert "give a local directory or a .safetensors file" in line
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: str(folder), "found neither a config.json .*nor a .safetensors"),
        (lambda folder: _write(folder / "config.json", "{"), "config.json is not JSON"),
        (lambda folder: _write(folder / "config.json", "[1]"), "JSON object, not a list"),
        (lambda folder: _write(folder / "x.safetensors", "no"), "x.safetensors is not a valid"),
        (lambda folder: _write(folder / "x.safetensors.index.json", "[]"), "is not a shard index"),
        (
            lambda folder: _write(folder / "x.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
            "missing files: .'b.safe",
        ),
        (lambda folder: "what is/this/name", "neither a local file or directory nor the name of a Hub repository"),
    ],
)
def test_what_cannot_be_measured_is_refused(make, message, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model_size(make(tmp_path))


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_nothing_is_asked_offline(tmp_path, monkeypatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"\(HF_HUB_OFFLINE is set\).*unset HF_HUB_OFFLINE"):
        model_size("nobody/nothing")


def test_files_that_hold_nothing_and_unknown_libraries_are_refused(tmp_path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match="no tensors in the file"):
        model_size(str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigurationError, match="library_name='keras'"):
        model_size("x", "keras")


def test_timm_is_named_where_it_is_missing(tmp_path) -> None:
    import importlib.util

    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed")
    with pytest.raises(MissingDependencyError, match=r"pip install 'timm'"):
        model_size("timm/resnet50.a1_in1k", "timm")
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    with pytest.raises(MissingDependencyError, match="timm"):
        model_size(str(tmp_path))


def test_code_of_a_model_is_run_only_if_it_is_trusted(tmp_path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ConfigurationError, match="--trust_remote_code to.*--library_name safetensors"):
        model_size(str(tmp_path), trust_remote_code=False)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigurationError, match="transformers cannot build the model"):
        model_size(str(tmp_path))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)))
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd_momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
def test_weights_gradients_and_optimizer_are_those_of_real_tensors(name, make) -> None:
    model = Small()
    optimizer = make(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    estimated = estimate_training(sum(p.numel() for p in parameters), optimizer=name)
    assert estimated.weights == sum(p.nbytes for p in parameters)
    assert estimated.gradients == sum(p.grad.nbytes for p in parameters)
    state = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    assert estimated.optimizer == pytest.approx(state, rel=0.01)  # Adam counts its steps too


@needs_transformers_5
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_activations_are_those_that_a_real_forward_keeps(mixed_precision, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from accel_bigmodel.estimate.activations import activations_of_config

    for config in (
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=200
        ),
        transformers.LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=200
        ),
        transformers.T5Config(d_model=64, num_layers=2, num_heads=4, d_ff=128, d_kv=16, vocab_size=200),
    ):
        config.save_pretrained(tmp_path)
        estimated = activations_of_config(tmp_path / "config.json", 3, 20, mixed_precision)
        model = transformers.AutoModel.from_config(config).train()
        inputs = {"input_ids": torch.ones(3, 20, dtype=torch.int64)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"].clone()
        else:
            model.config.use_cache = False

        def run_model(model=model, inputs=inputs):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed_precision == "bf16"):
                return model(**inputs)

        assert estimated == pytest.approx(measure_activations(model, run_model), rel=0.02), type(config).__name__


def test_an_image_model_is_counted_and_others_are_refused(tmp_path, bert_cased) -> None:
    transformers = pytest.importorskip("transformers")
    from accel_bigmodel.estimate.activations import activations_of_config

    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    transformers.ViTConfig(**settings, image_size=32, patch_size=16).save_pretrained(tmp_path)
    assert activations_of_config(tmp_path / "config.json", 2, 1) > 2 * 3 * 32 * 32
    transformers.Wav2Vec2Config(
        **settings, conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embedding_groups=2
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="takes input_values, not tokens or images"):
        activations_of_config(tmp_path / "config.json", 2, 1)
    with pytest.raises(ConfigurationError, match="tensors without values"):
        activations_of_config(Path(bert_cased) / "config.json", 2, 10_000)  # more tokens than positions
    with pytest.raises(ConfigurationError, match="mixed_precision='fp8' is not one of"):
        activations_of_config(Path(bert_cased) / "config.json", 1, 1, "fp8")


def test_activations_need_a_configuration(checkpoint) -> None:
    with pytest.raises(ConfigurationError, match="--batch_size=2: measuring.*model.*come"):
        run([str(checkpoint), "--batch_size", "2"])


def test_shares_of_each_strategy() -> None:
    kwargs = {"num_processes": 8, "largest_layer": 400, "activations": 340}
    ddp, fsdp, zero1, zero2, zero3 = (
        estimate_training(1000, name, **kwargs) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    )
    assert (ddp.weights, ddp.gradients, ddp.optimizer, ddp.buffers, ddp.activations) == (4000, 4000, 8000, 4000, 340)
    assert (zero1.weights, zero1.gradients, zero1.optimizer, zero1.buffers) == (4000, 4000, 1000, 0)
    assert (zero2.weights, zero2.gradients, zero2.optimizer) == (4000, 500, 1000)
    assert (zero3.weights, zero3.gradients, zero3.optimizer, zero3.buffers) == (500, 500, 1000, 1200)
    assert {**vars(fsdp), "strategy": "zero3"} == vars(zero3) and zero3.total == 500 + 500 + 1000 + 1200 + 340
    parallel = estimate_training(1000, "zero1", tensor_parallel=4, **kwargs)
    assert (parallel.weights, parallel.optimizer, parallel.activations) == (1000, 1000, 160)
    # Megatron-core in half precision: 2 bytes of weights, 4 of gradients, and 4 + 8 over the data-parallel ranks.
    megatron = estimate_training(1000, "megatron", tensor_parallel=2, pipeline_parallel=2, weight_bytes=2, **kwargs)
    assert (megatron.weights, megatron.gradients, megatron.optimizer, megatron.buffers) == (500, 1000, 1500, 0)
    # ZeRO's own count of mixed precision with Adam: 2 + 2 + 12 bytes for each parameter (arXiv:1910.02054, section 3.1)
    assert estimate_training(1000, weight_bytes=2, master_weights=True).total == 16_000


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strategy": "zero4"}, "strategy='zero4' is not one of ddp, fsdp, zero1"),
        ({"optimizer": "lion"}, "optimizer='lion' is not one of"),
        ({"num_processes": 6, "tensor_parallel": 4}, "num_processes=6 .* tensor_parallel=4"),
        ({"num_processes": 0}, "num_processes=0 must be a positive multiple"),
        ({"num_processes": 4, "pipeline_parallel": 2}, "pipeline_parallel=2 with strategy='ddp'"),
        ({"strategy": "megatron", "num_processes": 4, "tensor_parallel": 4, "pipeline_parallel": 2}, "_parallel=2"),
    ],
)
def test_bad_degrees_and_names_are_refused(kwargs, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        estimate_training(10, **kwargs)


def test_a_wrong_number_on_the_command_line_is_a_usage_error(capsys) -> None:
    for arguments in (["m", "--batch_size", "0"], ["m", "--dtypes", "int2"], []):
        with pytest.raises(SystemExit) as stopped:
            run(arguments)
        assert stopped.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_the_module_is_a_program_too(monkeypatch, capsys, checkpoint) -> None:
    monkeypatch.setattr(sys, "argv", ["estimate", str(checkpoint), "--dtypes", "int4"])
    assert main() == 0
    assert "| int4" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["estimate", str(checkpoint), "--batch_size", "1"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("python -m accel_bigmodel.estimate: error: --batch_size=1")
