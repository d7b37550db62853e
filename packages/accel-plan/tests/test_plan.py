"""`accel plan`: figures derived from shapes, the output in the guide, and invalid configurations."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from documents import all_commands, shows
from workspace import ROOT

from accel_bigmodel.estimate import measure_activations
from accel_bigmodel.estimate.activations import example_inputs
from accel_launch.config.read import load_settings
from accel_plan._torch_compat import FakeTensorMode
from accel_plan.command import COMMAND
from accel_plan.models import build_model, model_config
from accel_plan.plan import PlanRequest, make_plan
from accel_plan.record import axis_of, coordinates_of, sent_bytes
from accel_plan.report import as_text
from accel_plan.timing import EXPOSED
from accel_state.errors import ConfigurationError
from accel_state.hardware import profile

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

GUIDE = Path(__file__).parents[3] / "docs/guides/planning.md"
# The shapes of a Llama block's parameters, and of what stands outside of the blocks.
DIMENSIONS = {"llama-3-8b": (32, 4096, 1024, 14336), "llama-3-70b": (80, 8192, 1024, 28672)}
VOCABULARY = 128256


def shapes(model: str) -> list[tuple[int, ...]]:
    layers, hidden, keys, inner = DIMENSIONS[model]
    block = [
        (hidden, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, hidden),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    ]
    return [*(layers * [*block, (hidden,), (hidden,)]), (VOCABULARY, hidden), (VOCABULARY, hidden), (hidden,)]


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a parameter per rank with fully_shard, which pads the first dimension."""
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def small(folder: Path, **changed: object) -> str:
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 64}
    content |= {"num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({**content, "max_position_embeddings": 64, **changed}))
    return str(folder / "config.json")


def settings_of(**options: object):
    given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return load_settings(given, environ={"HF_HOME": "nowhere"})


FSDP2 = {"use_fsdp": True, "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def mesh(**sizes: int) -> dict[str, object]:
    named = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    return {**FSDP2, "use_parallelism_config": True, "num_processes": math.prod(sizes.values()), **named}


def documented() -> list[tuple[str, str]]:
    """The commands in the guide and their output."""
    blocks = re.findall(r"```text\n\$ accel plan ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    return [(command.replace("\\\n", " "), output) for command, output in blocks if "error:" not in output]


@pytest.mark.slow  # traces plans of large models; the figures of the guide have fast tests
@pytest.mark.parametrize("number", range(11))
def test_the_guide_shows_what_the_command_prints(tmp_path, monkeypatch, capsys, number) -> None:
    monkeypatch.chdir(tmp_path)
    command, output = documented()[number]
    config = re.search(r"```yaml\n(distributed_type: FSDP.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (tmp_path / "fsdp2.yaml").write_text(config[1])
    mixture = re.search(r"```json\n(.*?deepseek_v3.*?\n)```", GUIDE.read_text())
    (tmp_path / "deepseek-v3.json").write_text(mixture[1])
    assert COMMAND.run(command.replace("fsdp2.yaml", str(tmp_path / "fsdp2.yaml"), 1).split()) == 0
    assert capsys.readouterr().out == output


@pytest.mark.slow  # traces plans of a large model
def test_the_readme_shows_what_the_command_prints(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = (one for one in all_commands() if one.block.page == "README.md" and one.words[:2] == ["accel", "plan"])
    assert COMMAND.run(command.words[2:]) == 0
    printed = capsys.readouterr().out
    assert command.shown.count("...") == 4 and shows(command.shown, printed), printed


@pytest.mark.slow  # traces plans of a large model
def test_the_guide_has_what_asynchronous_tensor_parallelism_hides(tmp_path) -> None:
    rows = re.findall(
        r"^\| (?:none|`--(\S+) (true|false)`) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) GiB \|$", GUIDE.read_text(), re.M
    )
    assert len(rows) == 3
    options = {**mesh(dp_shard=32, tp=8), "fsdp_activation_checkpointing": True, "mixed_precision": "bf16"}
    for name, value, exposed, seconds, activations in rows:
        settings = settings_of(**options, **({name: value} if name else {}))
        request = PlanRequest(settings, "llama-3-70b", batch_size=16, seq_length=8192, hardware=profile("h100-sxm"))
        found = make_plan(request)
        at_peak = found.peak.categories["activations"] / 2**30
        shown = found.time.parts[f"{EXPOSED}, tp"], found.time.seconds, at_peak
        assert [f"{value:.2f}" for value in shown] == [exposed, seconds, activations]


ALONE, SPLIT = {"num_processes": 1, "cpu": True}, {**mesh(tp=2), "use_fsdp": False}


@pytest.mark.parametrize(
    ("options", "precision", "dtype"),
    [(ALONE, "no", "float32"), (ALONE, "bf16", "bfloat16"), (SPLIT, "bf16", "bfloat16")],
)
def test_a_model_without_a_wrapper_is_traced_in_its_precision(tmp_path, options, precision, dtype) -> None:
    """The autocast around its forward must stay: products are those of 16 bits."""
    settings = settings_of(**{**options, "mixed_precision": precision})
    plan = make_plan(PlanRequest(settings, small(tmp_path), seq_length=16, hardware=profile("h100-sxm")))
    products = {item.dtype for _, items in plan.operations for item in items if item.kind == "matrix products"}
    assert products == {dtype}


def figure(output: str, name: str) -> int:
    return int(re.search(rf"^  {name}\s+([\d,]+)", output, flags=re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize("number", range(7))
def test_the_figures_of_the_guide_follow_from_the_shapes(number) -> None:
    """The derivation in the guide, without torch."""
    command, output = documented()[number]
    model = re.search(r"--model (\S+)", command)[1]
    ranks = int(re.search(r"--num_processes (\d+)", command)[1])
    sizes = {axis: int(size) for axis, size in re.findall(r"parallelism_config_(\w+)_size (\d+)", command)}
    tp, shards = sizes.get("tp", 1), sizes.get("dp_shard", ranks)
    assert f"{sum(map(math.prod, shapes(model))):,} parameters" in output
    # Norms stay whole; matrices are divided by tensor parallelism first, along either dimension, which here divides
    # evenly.
    own = sum(padded(shape, shards if len(shape) == 1 else shards * tp) for shape in shapes(model))
    assert figure(output, "parameters") == figure(output, "gradients") == 4 * own
    assert figure(output, "optimizer state") == 8 * own
    # Blocks are gathered for their forward and for their backward, in bf16, the rest once; gradients are reduced once,
    # in float32.
    rest = sum(padded(shape, shards if len(shape) == 1 else shards * tp) for shape in shapes(model)[-3:])
    gathered = sent_bytes("all-gather", 2 * shards * (2 * own - rest), shards)
    assert figure(output, rf"all-gather\s+dp_shard\s+{shards} ranks\s+\d+ calls") == gathered
    reduced = sent_bytes("reduce-scatter", 4 * shards * own, shards)
    assert figure(output, rf"reduce-scatter\s+dp_shard\s+{shards} ranks\s+\d+ calls") == reduced
    copies = sizes.get("dp_replicate", 1)
    if copies > 1:
        assert figure(output, rf"all-reduce\s+dp_replicate\s+{copies} ranks\s+\d+ calls") == sent_bytes(
            "all-reduce", 4 * own, copies
        )
    rank = int((re.search(r"--rank (\d+)", command) or (0, "0"))[1])
    assert f"data: data rank {rank // tp} of {ranks // tp};" in output


def test_the_figures_of_the_pipeline_follow_from_the_shapes() -> None:
    """Stage 2 of 8, with 10 of 80 blocks; 8 micro batches of 1 sample, tp 8, dp_shard 64."""
    _, output = documented()[7]
    every = shapes("llama-3-70b")
    stage, tp, shards, micro, flying = every[: 10 * 9], 8, 64, 8, 6

    def own(some: list[tuple[int, ...]]) -> int:
        return sum(padded(shape, shards if len(shape) == 1 else shards * tp) for shape in some)

    assert (
        f"pipeline: stage 2, blocks 20 to 29 of 80; 1f1b, 8 micro batches of 1 sample(s), at most {flying} in flight"
        in output
    )
    assert figure(output, "parameters") == figure(output, "gradients") == 4 * own(stage)
    assert figure(output, "optimizer state") == 8 * own(stage)
    # At the end of a backward pass, the whole stage is gathered in bf16, and its gradients are whole in float32.
    assert figure(output, "gathered or in flight") == (2 + 4) * sum(
        math.prod(shape) // (1 if len(shape) == 1 else tp) for shape in stage
    )
    passed = 8192 * 8192 * 2
    # Of the ten blocks, the first saves its whole input, the others their part of the sequence.
    saved = flying * (1 + 9 / tp)
    assert figure(output, "activations") == pytest.approx((saved + 2 * micro) * passed, rel=0.05)
    for what in ("activations", "gradients"):
        assert figure(output, rf"{what}\s+pp\s+2 ranks\s+{micro} calls") == micro * passed
    gathered, reduced = (
        sent_bytes(kind, size * shards * own(stage), shards)
        for kind, size in (("all-gather", 18), ("reduce-scatter", 4))
    )
    assert figure(output, r"all-gather\s+dp_shard\s+64 ranks\s+90 calls") == gathered
    assert figure(output, r"reduce-scatter\s+dp_shard\s+64 ranks\s+10 calls") == reduced
    # Two layers of a block gather in the forward, its recomputation and the backward, and the stage at both ends; the
    # recomputation ends before the block's last reduce-scatter. Norms have their gradients summed, in bf16.
    for kind, calls in (("all-gather", 62 * micro), ("reduce-scatter", 50 * micro)):
        assert figure(output, rf"{kind}\s+tp\s+8 ranks\s+{calls} calls") == sent_bytes(kind, calls * passed, tp)
    norms = sent_bytes("all-reduce", 20 * micro * 8192 * 2, tp)
    assert figure(output, r"all-reduce\s+tp\s+8 ranks\s+160 calls") == norms
    held = [int(number.replace(",", "")) for number in re.findall(r"blocks \d+ to \d+\s+([\d,]+)  ", output)]
    assert held == [4 * own([*stage, every[-3]]), *6 * [4 * own(stage)], 4 * own([*stage, *every[-2:]])]
    assert "data rank 34 of 64; samples 272, 273" in output


@pytest.mark.slow  # traces every block of several set-ups; the figures of the guide have fast tests
@pytest.mark.parametrize(
    "options",
    [
        {**FSDP2, "num_processes": 8, "gradient_accumulation_steps": 3, "fsdp_reshard_after_forward": False},
        {
            "use_fsdp": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "num_processes": 8,
            "mixed_precision": "bf16",
        },
    ],
)
def test_extrapolation_equals_tracing_all_blocks(tmp_path, options) -> None:
    model = small(tmp_path, num_hidden_layers=5)
    quick, whole = (
        make_plan(PlanRequest(settings_of(**options), model, rank=3, batch_size=2, seq_length=16, all_blocks=every))
        for every in (False, True)
    )
    assert quick == whole


@pytest.mark.slow  # traces two ranks of a mesh; test_activations_are_close_to_saved_tensors is fast
def test_ranks_that_share_layers_or_sequences_share_samples(tmp_path) -> None:
    model = small(tmp_path, num_attention_heads=8)
    settings = settings_of(**mesh(dp_shard=2, cp=2, tp=2))
    plans = [make_plan(PlanRequest(settings, model, rank=rank, batch_size=2, seq_length=32)) for rank in (3, 5)]
    assert [one.batch.samples for one in plans] == [(0, 1), (2, 3)]
    assert [one.coordinates["cp"] for one in plans] == [(1, 2), (0, 2)]
    assert {(one.batch.ranks, one.batch.global_size, one.local_length) for one in plans} == {(2, 4, 16)}
    kinds = {(one.kind, one.axis) for one in plans[0].collectives}
    assert kinds >= {
        ("all-gather", "dp_shard+cp"),
        ("reduce-scatter", "dp_shard+cp"),
        ("all-reduce", "tp"),
        ("all-gather", "cp"),
    }


def test_sequences_shared_by_heads_are_exchanged_around_attention(tmp_path) -> None:
    """Four all-to-alls per block in the forward and in the backward pass: queries, keys, values and the output."""
    model = small(tmp_path, num_attention_heads=8)
    found = make_plan(PlanRequest(settings_of(**mesh(dp_shard=2, sp=2)), model, rank=1, batch_size=2, seq_length=32))
    exchanged = next(one for one in found.collectives if one.kind == "all-to-all")
    hidden, keys = 2 * 16 * 48 * 4, 2 * 16 * 4 * 6 * 4
    assert (exchanged.axis, exchanged.calls, exchanged.payload) == ("sp", 2 * 8, 2 * 2 * (2 * hidden + 2 * keys))
    assert (found.local_length, found.batch.samples) == (16, (0, 1))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_activations_are_close_to_saved_tensors(tmp_path, precision) -> None:
    """The estimate counts tensors saved by autograd; the plan counts live memory, including outputs."""
    model = small(tmp_path, hidden_size=96, intermediate_size=256, num_hidden_layers=3)
    found = make_plan(
        PlanRequest(
            settings_of(num_processes=1, cpu=True, mixed_precision=precision), model, batch_size=2, seq_length=64
        )
    )
    built = build_model(model_config(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        built.to_empty(device="cpu")
        inputs = example_inputs(built, 2, 64)

        def run() -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                return built(**inputs, labels=inputs["input_ids"]).loss

        saved = measure_activations(built, run)
    assert found.memory.activations == pytest.approx(saved, rel=0.1)


TIED = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32},
    "bert": {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "num_layers": 1, "d_model": 32, "num_heads": 2, "d_kv": 16},
}


@pytest.mark.parametrize("kind", TIED)
def test_tied_weights_are_held_and_sent_once(tmp_path, kind) -> None:
    content = {"model_type": kind, "vocab_size": 128, "intermediate_size": 64, "d_ff": 64, **TIED[kind]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = make_plan(PlanRequest(settings_of(num_processes=4), str(tmp_path), rank=1, seq_length=16))
    assert found.memory.weights == found.memory.gradients == 4 * found.parameters
    assert next(one.payload for one in found.collectives if one.kind == "all-reduce") == 4 * found.parameters


def test_overlapped_products_send_what_others_send(tmp_path) -> None:
    model, options = small(tmp_path), mesh(tp=2)
    plain, overlapped = (
        make_plan(PlanRequest(settings_of(**options, **more), model, batch_size=2, seq_length=16))
        for more in ({}, {"parallelism_config_enable_async_tp": True})
    )
    assert plain.collectives and overlapped.collectives == plain.collectives


def test_one_process_trains_without_fsdp(tmp_path: Path) -> None:
    """With the warning that a run gives; nothing is sharded or offloaded then."""
    alone = settings_of(**FSDP2, num_processes=1, fsdp_offload_params=True)
    found = make_plan(PlanRequest(alone, small(tmp_path), seq_length=16))
    plain = make_plan(PlanRequest(settings_of(num_processes=1), small(tmp_path), seq_length=16))
    assert found.strategy == plain.strategy == "ddp" and found.offloaded == ()
    assert found.coordinates == plain.coordinates
    assert found.memory == plain.memory and found.peak == plain.peak


def test_offloaded_parts_are_marked(tmp_path) -> None:
    found = make_plan(
        PlanRequest(settings_of(**FSDP2, num_processes=2, fsdp_offload_params=True), small(tmp_path), seq_length=16)
    )
    text = as_text(found)
    assert found.offloaded == ("weights", "gradients", "optimizer")
    assert figure(text, "on the device") == found.memory.buffers + found.memory.activations
    assert found.peak is None and "is not followed" in text
    assert sum(line.endswith("offloaded") for line in text.splitlines()) == 3


def test_accumulation_reduces_once_and_gathers_with_every_micro_batch(tmp_path) -> None:
    model = small(tmp_path)
    one, four = (
        make_plan(
            PlanRequest(settings_of(**FSDP2, num_processes=4, gradient_accumulation_steps=steps), model, seq_length=16)
        )
        for steps in (1, 4)
    )
    calls = [{each.kind: (each.calls, each.payload) for each in found.collectives} for found in (one, four)]
    assert calls[1]["reduce-scatter"] == calls[0]["reduce-scatter"]
    assert calls[1]["all-gather"] == tuple(4 * value for value in calls[0]["all-gather"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_stages(tmp_path, stage) -> None:
    options = {
        "use_deepspeed": True,
        "zero_stage": stage,
        "num_processes": 4,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 2,
    }
    found = make_plan(PlanRequest(settings_of(**options), small(tmp_path), seq_length=16))
    values = found.parameters
    weights, gradients, optimizer = (2 * values, 2 * values, 12 * values)
    memory = found.memory
    expected = [
        weights / (4 if stage > 2 else 1),
        gradients / (4 if stage > 1 else 1),
        optimizer / (4 if stage > 0 else 1),
    ]
    assert [memory.weights, memory.gradients, memory.optimizer] == [round(value) for value in expected]
    reduced, gathered = {2: 2, 3: 2}.get(stage, 1), {3: 4}.get(stage, 1)
    times = {"reduce-scatter": reduced, "all-gather": gathered} if stage else {"all-reduce": 1}
    assert {one.kind: one.payload for one in found.collectives} == {
        kind: count * 2 * values for kind, count in times.items()
    }


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", None), ("bf16", "bfloat16"), ("no", "bfloat16"), ("no", None)]
)
def test_deepspeed_gathers_layers_in_the_dtype_of_the_weights(tmp_path, precision, dtype) -> None:
    options = {"use_deepspeed": True, "zero_stage": 3, "num_processes": 4, "mixed_precision": precision}
    found = make_plan(PlanRequest(settings_of(**options), small(tmp_path, dtype=dtype), seq_length=16))
    block = 2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 64 + 2 * 48
    width = 4 if precision == "no" and dtype is None else 2
    assert found.memory.weights == width * found.parameters / 4
    assert found.memory.buffers == 3 * width * block


EIGHT = {**FSDP2, "num_processes": 8}


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        (mesh(dp_shard=2, tp=8), {}, "tp_size=8 does not divide num_attention_heads=12.*Allowed: 1, 2, 3, 4, 6, 12"),
        ({**mesh(dp_shard=2, tp=2), "num_processes": 6}, {}, "dp_shard_size=2 x .*tp_size=2.* = 4, .* 6 processes"),
        (mesh(dp_shard=2, cp=4), {"seq_length": 20}, "of 20 positions .* cp_size=4.*multiple of 8"),
        (EIGHT, {"batch_size": 4, "split_batches": True}, "4 samples .* 8 data-parallel ranks.*multiples of 8"),
        (EIGHT, {"rank": 8}, r"--rank 8: with 8 process\(es\), ranks go from 0 to 7"),
        (EIGHT, {"seq_length": 65}, "--seq_length 65: .* max_position_embeddings=64"),
        ({**EIGHT, "num_processes": 9, "num_machines": 2}, {}, "num_processes=9 .* num_machines=2"),
        ({"num_processes": 10**9}, {}, "num_processes 1000000000: a plan is for up to 1000000 processes"),
        (FSDP2, {}, "does not set the number of processes. Set --num_processes"),
        (
            {"strategy": "fsdp2", "num_processes": 2},
            {},
            "--strategy fsdp2: .* does not know what strategies of that option hold",
        ),
        ({**EIGHT, "mixed_precision": "fp8"}, {}, "Plan with --mixed_precision bf16"),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "HYBRID_SHARD", "num_processes": 8}, {}, "HYBRID_SHARD .* 8"),
        ({**EIGHT, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}, {}, "no module of class BertLayer"),
        ({"use_deepspeed": True, "num_processes": 2, "deepspeed_config_file": "nowhere.json"}, {}, "nowhere.json"),
    ],
)
def test_invalid_configurations(tmp_path, options, asked, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(PlanRequest(settings_of(**options), small(tmp_path), **{"seq_length": 16, **asked}))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama-3-9b", "not found. Allowed: llama-3-8b, llama-3-70b"),
        ("{folder}", "it has no config.json"),
        ("{folder}/list.json", "is not a Transformers model configuration: it contains a list"),
        ("{folder}/bare.json", "model_type is missing"),
        ("{folder}/odd.json", "is not a Transformers model configuration"),
    ],
)
def test_invalid_models(tmp_path, model, message) -> None:
    for name, content in (("list", "[]"), ("bare", "{}"), ("odd", '{"model_type": "no-such-model"}')):
        (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        make_plan(PlanRequest(settings_of(num_processes=2), model.format(folder=tmp_path)))


def test_the_command_reads_the_file_and_prints_json(tmp_path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n")
    options = ["--model", small(tmp_path), "--seq_length", "16", "--batch_size", "8", "--split_batches"]
    options += ["--rank", "2", "--optimizer", "sgd"]
    assert COMMAND.run([str(file), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["coordinates"] == {"dp_replicate": {"coordinate": 2, "size": 4}}
    assert found["batch"] == {"ranks": 4, "rank": 2, "global_size": 8, "samples": [4, 5]}
    assert found["memory"]["optimizer"] == 0 and found["memory"]["weights"] == 4 * found["parameters"]
    assert {one["kind"] for one in found["collectives"]} == {"all-reduce", "broadcast"}
    for words in (["--config_file", str(file)], [str(file), "--config-file", str(file)]):
        assert COMMAND.run([*words, *options, "--json"]) == 0 and json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.yaml", "--model", "llama-3-8b", "--rank", "x"], "--rank x: must be an integer of at least 0"),
        (["run.yaml", "--model", "llama-3-8b", "--batch_size", "0"], "--batch_size 0: .* at least 1"),
        (["nope.yaml"], r"CONFIG nope.yaml: no.*\(looked"),
        (["--config_file", "nope.yaml"], "--config_file nope.yaml: no such file"),
        (["--model", "llama-3-8b"], "configuration is missing"),
        (["other.yaml", "--config-file", "run.yaml"], "other.yaml contradicts --config_file"),
        (["run.yaml"], "--model is missing. Give llama-3-8b"),
        (["run.yaml", "--modle", "llama-3-8b"], "--modle is not an option. Did you mean --model"),
        (["run.yaml", "--model", "llama-3-8b", "--pp_num_microbatches", "x"], "--pp_num_microbatches x:.*least 1"),
    ],
)
def test_invalid_commands(tmp_path, monkeypatch, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    with pytest.raises(ConfigurationError, match=message):
        COMMAND.run(words)


def test_bytes_of_collectives_and_names_of_axes() -> None:
    sent = {
        kind: sent_bytes(kind, 800, 8)
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "broadcast")
    }
    assert sent == {"all-gather": 700, "reduce-scatter": 700, "all-to-all": 700, "all-reduce": 1400, "broadcast": 800}
    assert sent_bytes("all-reduce", 800, 1) == 0
    axes = {"dp_replicate": 4, "dp_shard": 128, "tp": 8}
    assert coordinates_of(1234, axes) == {"dp_replicate": 1, "dp_shard": 26, "tp": 2}
    assert axis_of(range(1232, 1240), axes) == "tp"
    assert axis_of(range(2, 1024, 8), axes) == "dp_shard"
    assert axis_of(range(2, 4096, 8), axes) == "dp_replicate+dp_shard"
    assert axis_of([5], axes) == "one rank"
