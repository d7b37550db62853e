"""Pipelined inference on real processes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from accel_bigmodel import inference
from accel_bigmodel.inference import build_pipeline, find_pippy_batch_size, pippy_forward, prepare_pippy
from accel_bigmodel.pipeline.broadcast import receive_object, send_object, wait_for
from accel_state.errors import ConfigurationError
from accel_state.state import PartialState
from accel_state.testing import run_world

NAMES = ["gpt2", "gpt2 classifier", "bert", "t5", "llama"]


def transformer(name):
    from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config
    from transformers.models.bert.modeling_bert import BertForMaskedLM
    from transformers.models.gpt2.modeling_gpt2 import GPT2ForSequenceClassification, GPT2LMHeadModel
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    gpt2 = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=99, n_positions=64, pad_token_id=0)
    t5 = T5Config(d_model=32, num_layers=4, num_heads=2, d_ff=64, d_kv=16, vocab_size=99)
    models = {
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
        "gpt2 classifier": lambda: GPT2ForSequenceClassification(gpt2),
        "bert": lambda: BertForMaskedLM(BertConfig(**small)),
        "t5": lambda: T5ForConditionalGeneration(t5),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**small)),
    }
    torch.manual_seed(0)
    return models[name]().eval()


def batch(name, size, length, mask):
    dice = torch.Generator().manual_seed(size * 100 + length)
    inputs = {"input_ids": torch.randint(1, 99, (size, length), generator=dice)}
    if mask:
        inputs["attention_mask"] = torch.ones(size, length, dtype=torch.int64)
        inputs["attention_mask"][0, -2:] = 0
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(1, 99, (size, length - 2), generator=dice)
    return inputs


def compare_transformers(names):
    rank = PartialState().process_index
    for name in names:
        model = prepare_pippy(transformer(name), example_kwargs=batch(name, 2, 7, False), gather_output=True)
        whole = transformer(name)
        assert len(model.hf_split_points) == PartialState().num_processes - 1
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held < sum(parameter.numel() for parameter in whole.parameters()), "every stage holds the whole model"
        # Twice the same shapes: the first time they are learned, the second time ScheduleGPipe moves bare tensors.
        for size, length, mask in [
            (4, 7, True),
            (4, 7, True),
            (4, 7, False),
            (5, 9, True),
            (3, 7, True),
            (5, 9, True),
            (1, 5, False),
        ]:
            inputs = batch(name, size, length, mask)
            output = model(**inputs) if rank == 0 else model()  # the others need not know the batch
            with torch.no_grad():
                expected = whole(**inputs) if name == "bert" else whole(**inputs, use_cache=False)
            assert type(output) is type(expected) and list(output) == list(expected)
            for key, value in expected.items():
                torch.testing.assert_close(
                    output[key],
                    value,
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda text, key=key, name=name: f"{name} {key}: {text}",
                )
    return model.hf_split_points


@pytest.mark.slow  # imports transformers in 2 and 4 ranks; test_a_custom_model is fast
@pytest.mark.parametrize(("ranks", "names"), [(2, NAMES), (4, NAMES)])
@pytest.mark.timeout(500)  # every rank imports transformers, which takes long where there are fewer cores than ranks
def test_outputs_of_transformers_equal_those_of_the_whole_model(ranks, names) -> None:
    pytest.importorskip("transformers")
    assert run_world(compare_transformers, ranks, names, timeout=480)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=None, with_count=False):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.head(self.norm(x))
        x = x if scale is None else x * scale
        return (x, x > 0, {"sum": x.sum(1)}) if with_count else x


def net():
    torch.manual_seed(0)
    return Net().eval()


def run_custom():
    state = PartialState()
    last = state.process_index == state.num_processes - 1
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    whole = net()
    with torch.no_grad():
        expected = whole(x)
    for num_chunks in (None, 1, 3, 7):
        model = prepare_pippy(net(), example_args=(x[:2],), num_chunks=num_chunks)
        for _ in range(3):
            output = model(x)
            assert (output is None) is not last
            if last:
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        # Other optional arguments than in the example, other outputs, an input without samples.
        output = model(x, scale=torch.tensor(2.0), with_count=True)
        if last:
            torch.testing.assert_close(output[0], 2 * expected, rtol=1e-5, atol=1e-6)
            assert output[1].dtype == torch.bool and torch.equal(output[1], output[0] > 0)
            torch.testing.assert_close(output[2]["sum"], output[0].sum(1), rtol=1e-5, atol=1e-6)
    kept = model(x)
    copy = None if kept is None else kept.clone()
    model(x + 1)
    assert kept is None or torch.equal(kept, copy), "an output changes with the next batch"


def run_split_points():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net()(x)
    model = prepare_pippy(net(), split_points=["blocks.1"], example_args=(x,), gather_output=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert model.hf_split_points == ["blocks.1"]
    inside = prepare_pippy(net(), split_points=["blocks.2.2"], example_args=(x,), gather_output=True)
    torch.testing.assert_close(inside(x), expected, rtol=1e-5, atol=1e-6)
    whole = prepare_pippy(net(), no_split_module_classes=["Sequential"], example_args=(x,), gather_output=True)
    torch.testing.assert_close(whole(x), expected, rtol=1e-5, atol=1e-6)
    return whole.hf_split_points, inside.hf_split_points


class Counting(nn.Module):
    """A module whose result holds a number that depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), int((x > 0).sum())


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), nn.Linear(4, 4)

    def forward(self, x):
        x, count = self.first(x)
        return self.second(x) + count


def run_numbers():
    torch.manual_seed(0)
    model, whole = Counted(), Counted()
    whole.load_state_dict(model.state_dict())
    model = prepare_pippy(
        model, no_split_module_classes=["Counting"], example_args=(torch.ones(2, 4),), gather_output=True, num_chunks=1
    )
    for seed in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            torch.testing.assert_close(model(x), whole(x))


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (
        ConfigurationError,
        RuntimeError,
    ) as error:  # a failure of the model itself is shown as it is on the rank that tried it
        return str(error)
    return "nothing"


def run_errors():
    """Every rank must learn of an error, or the others would wait forever."""
    x = torch.randn(4, 6)
    rank = PartialState().process_index
    found = [
        refused(prepare_pippy, net()),
        refused(prepare_pippy, net().to("meta"), example_args=(x,)),
        refused(prepare_pippy, net(), split_points=["nowhere"], example_args=(x,)),
        refused(prepare_pippy, net(), example_args=(torch.randn(4, 5),)),
        refused(prepare_pippy, net(), example_args=(x,), num_chunks=-1),
    ]
    model = prepare_pippy(net(), example_args=(x,))
    found.append(refused(model, 3.0) if rank == 0 else refused(model))
    found.append(refused(model, x, use_cache=True) if rank == 0 else refused(model))
    found.append(refused(prepare_pippy, model, example_args=(x,)))
    return found


def all_custom():
    run_custom()
    run_numbers()
    return run_split_points(), run_errors()


def test_a_custom_model() -> None:
    results = run_world(all_custom, 2, timeout=110)
    points, _ = results[0]
    assert points[0][0].startswith("blocks.") and points[1] == ["blocks.2.2"]
    expected = [
        "needs an example",
        "tensors of the model have no values",
        "not a submodule of Net",
        "rank 0 could not split the model: RuntimeError",
        "num_chunks=-1",
        "no batch size can be found",
        "use_cache=True: the cache of each layer would stay on its own rank",
        "is already a pipeline",
    ]
    rank0, rank1 = (errors for _, errors in results)
    for what, on_first, on_second in zip(expected, rank0, rank1, strict=True):
        assert what in on_second
        assert what in on_first or what.startswith("rank 0 could"), on_first


@pytest.mark.slow  # four ranks; test_a_custom_model runs the same on two
def test_on_four_processes_with_more_and_fewer_chunks_than_processes() -> None:
    assert run_world(run_custom, 4, timeout=110) == [None] * 4


def test_in_a_single_process_it_is_the_model_itself() -> None:
    x = torch.randn(5, 6)
    with torch.no_grad():
        expected = net()(x)
    model = prepare_pippy(net(), gather_output=True)
    torch.testing.assert_close(model(x), expected)
    assert model.hf_split_points == []
    assert not model(x).requires_grad
    PartialState._reset_state()


class Reading(nn.Module):
    """Reads `x` in its first layer, and in its last lines too if sequences are long; `scale` in its last line."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale):
        out = self.second(self.first(x)) * scale
        return out + x if x.shape[1] > 2 else out


def run_unread():
    torch.manual_seed(0)
    whole = Reading().requires_grad_(False)
    x, scale = torch.randn(4, 2, 4), torch.randn(4, 1, 1)
    expected = whole(x, scale)
    model = prepare_pippy(
        copy.deepcopy(whole), ["second"], example_args=(x[:2].clone(), scale[:2].clone()), gather_output=True
    )
    with mock.patch.object(inference, "start_broadcast", wraps=inference.start_broadcast) as sent:
        found = model(x, scale)
    torch.testing.assert_close(found, expected)
    if PartialState().process_index == 0:  # the scale alone has values that the second rank reads
        assert [[tuple(item.shape) for item in call.args[0]] for call in sent.call_args_list] == [[(4, 1, 1)]]
    torch.testing.assert_close(model(scale=scale, x=x), expected)  # not as in the example: all is sent
    long = torch.randn(4, 3, 4)  # another path of the model, which reads what the example left alone
    torch.testing.assert_close(model(long, scale), whole(long, scale))
    odd = torch.randn(3, 2, 4)
    torch.testing.assert_close(model(odd, scale[:3]), whole(odd, scale[:3]))


def exchange_objects() -> None:
    device = PartialState().device
    # Pickled, these are shorter than the first message, fill it to the byte, and are longer.
    for size in (0, 2000, *range(2005, 2020), 5000):
        item = {"text": "x" * size}
        if PartialState().process_index == 0:
            wait_for(send_object(item, device))
        else:
            assert receive_object(device) == item


def exchange() -> None:
    run_unread()
    exchange_objects()


def test_objects_of_every_length_and_only_the_values_that_a_stage_reads_are_sent() -> None:
    run_world(exchange, 2)


def test_the_batch_size_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert find_pippy_batch_size((torch.tensor(1.0), [torch.ones(3, 2)]), {}) == 3
    assert find_pippy_batch_size((), {"x": torch.ones(4)}) == 4
    assert find_pippy_batch_size(None, None) is None


def test_the_batch_is_filled_up_for_what_runs_it() -> None:
    seen = []

    def run(x):
        seen.append(x.shape[0])
        return x * 2

    assert pippy_forward(run, 4, False, torch.ones(5, 2)).shape == (5, 2)
    assert seen == [8]
    assert build_pipeline(net(), "auto", (), {}, 1).split_points == []
    PartialState._reset_state()
