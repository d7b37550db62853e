from __future__ import annotations

import copy
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_quant import BnbQuantizationConfig, load_and_quantize_model
from accel_state.errors import ConfigurationError

CONFIGS = {
    "8bit": {"load_in_8bit": True},
    "8bit without outliers, fp32": {"load_in_8bit": True, "llm_int8_threshold": 0.0, "torch_dtype": torch.float32},
    "fp4": {"load_in_4bit": True},
    "nf4 double bf16": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        **{"bnb_4bit_compute_dtype": "bf16", "torch_dtype": "fp32"},
    },
}
DISK = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "head": "disk", "scale": "cpu"}
every_config = pytest.mark.parametrize("kwargs", CONFIGS.values(), ids=CONFIGS)


def run(model, tokens):
    with torch.no_grad():
        return model(tokens).float()


def save(model, folder):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


def empty(build):
    with init_empty_weights():
        return build()


def similarity(first, second):
    return torch.cosine_similarity(first.cpu().flatten(), second.cpu().flatten(), dim=0).item()


@every_config
def test_meta_and_loaded_models_give_the_same_close_to_the_original(kwargs, build, tokens, tmp_path) -> None:
    expected = run(build(), tokens)
    loaded = load_and_quantize_model(build(), BnbQuantizationConfig(**kwargs))
    from_meta = load_and_quantize_model(
        empty(build), BnbQuantizationConfig(**kwargs), weights_location=save(build(), tmp_path / "whole")
    )
    assert not any(tensor.is_meta for tensor in from_meta.state_dict().values())
    torch.testing.assert_close(run(from_meta, tokens), run(loaded, tokens), rtol=0, atol=0)
    assert similarity(run(loaded, tokens), expected) > (0.999 if "load_in_8bit" in kwargs else 0.95)
    assert (loaded.is_loaded_in_8bit, loaded.is_loaded_in_4bit) == ("load_in_8bit" in kwargs, "load_in_4bit" in kwargs)


@every_config
def test_saved_and_loaded_again_it_is_the_same_to_the_bit(kwargs, build, tokens, tmp_path) -> None:
    model = load_and_quantize_model(build(), BnbQuantizationConfig(**kwargs))
    before = save(model, tmp_path / "before")
    expected = run(model, tokens)
    after = save(model, tmp_path / "after")
    for folder in (before, after):  # a forward rearranges what bitsandbytes holds
        again = load_and_quantize_model(empty(build), BnbQuantizationConfig(**kwargs), weights_location=folder)
        torch.testing.assert_close(run(again, tokens), expected, rtol=0, atol=0)
        assert {name: tensor.dtype for name, tensor in again.state_dict().items() if "weight" in name} == {
            name: tensor.dtype for name, tensor in model.state_dict().items() if "weight" in name
        }


@every_config
def test_what_is_on_the_disk_is_quantized_and_computes_the_same(kwargs, build, tokens, tmp_path) -> None:
    config = BnbQuantizationConfig(**kwargs)
    expected = run(load_and_quantize_model(build(), config), tokens)
    source = save(build(), tmp_path / "whole")
    offloaded = load_and_quantize_model(empty(build), config, source, DISK, offload_folder=tmp_path / "disk")
    from_loaded = load_and_quantize_model(build(), config, device_map=DISK, offload_folder=tmp_path / "other")
    for model in (offloaded, from_loaded):
        assert model.hf_device_map == DISK
        assert model.blocks[0].up.weight is None and model.blocks[1].up.weight is not None
        for _ in range(2):
            torch.testing.assert_close(run(model, tokens), expected, rtol=0, atol=0)
        assert model.blocks[0].up.weight is None, "the weight stays in memory after the forward"
    written = sum(file.stat().st_size for file in (tmp_path / "disk").glob("blocks.0.*.quantized.safetensors"))
    assert written < 0.4 * 2 * 64 * 128 * 4, "not quantized on the disk"


@every_config
def test_a_quantized_checkpoint_is_read_in_place(kwargs, build, tokens, tmp_path) -> None:
    config = BnbQuantizationConfig(**kwargs)
    model = load_and_quantize_model(build(), config)
    source = save(model, tmp_path / "quantized")
    offloaded = load_and_quantize_model(empty(build), config, source, DISK, offload_folder=tmp_path / "disk")
    torch.testing.assert_close(run(offloaded, tokens), run(model, tokens), rtol=0, atol=0)
    assert not list((tmp_path / "disk").glob("*.quantized.safetensors"))


def test_an_offloaded_model_is_saved_whole(build, tokens, tmp_path) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32")
    whole = load_and_quantize_model(build(), config).state_dict()
    model = load_and_quantize_model(build(), config, device_map=DISK, offload_folder=tmp_path)
    state = model.state_dict()
    assert set(state) == set(whole)
    assert all(
        torch.equal(state[name], whole[name])
        for name in whole
        if name.startswith(("blocks.0.up.weight", "blocks.1.down"))
    )


def test_a_copy_of_an_offloaded_model_works_by_itself(build, tokens, tmp_path) -> None:
    model = load_and_quantize_model(
        build(), BnbQuantizationConfig(load_in_8bit=True), device_map=DISK, offload_folder=tmp_path
    )
    layer = copy.deepcopy(model.blocks[0].up)
    x = torch.randn(2, 64, dtype=torch.float16)
    with torch.no_grad():
        state = model.blocks[0].up._offload.read()
        assert layer._offload is not model.blocks[0].up._offload and set(state) == {"weight", "SCB", "weight_format"}
        assert layer.weight is None and x.shape == (2, 64)


def test_a_map_is_found_from_the_quantized_sizes(build, tokens, tmp_path) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32")
    expected = run(load_and_quantize_model(build(), config), tokens)
    quantized = 4 * 64 * 128 // 2
    other = sum(
        p.numel() * 4 for name, p in build().named_parameters() if not name.endswith(("up.weight", "down.weight"))
    )
    room = quantized + other + 4096  # a quarter of what the weights take in float32
    model = load_and_quantize_model(
        build(), config, device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path
    )
    assert set(model.hf_device_map.values()) == {"cpu"}
    tight = load_and_quantize_model(
        build(), config, device_map="auto", max_memory={"cpu": room - 6000}, offload_folder=tmp_path
    )
    assert "disk" in tight.hf_device_map.values()
    torch.testing.assert_close(run(tight, tokens), expected, rtol=0, atol=0)
    whole = load_and_quantize_model(
        build(),
        config,
        device_map="sequential",
        max_memory={"cpu": room - 6000},
        no_split_module_classes=["Block"],
        offload_folder=tmp_path,
    )
    assert not any(name.startswith("blocks.0.") or name.startswith("blocks.1.") for name in whole.hf_device_map)


def test_the_threshold_decides_what_is_computed_in_half_precision(build) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 40.0  # an outlier column spoils the scale of the others
    exact = nn.functional.linear(x, build().blocks[0].up.weight, build().blocks[0].up.bias)
    errors = []
    for threshold in (6.0, 0.0):
        config = BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=threshold, torch_dtype="fp32")
        model = load_and_quantize_model(build(), config)
        with torch.no_grad():
            errors.append((model.blocks[0].up(x).cpu() - exact.cpu()).abs().mean().item())
    assert errors[0] < 0.5 * errors[1]


def test_nf4_is_closer_than_fp4_and_double_quantization_is_smaller(build) -> None:
    import bitsandbytes  # takes seconds, which each worker that collects the tests would wait

    weight = build().blocks[0].up.weight.detach()
    errors, sizes = {}, {}
    for kind, double in (("fp4", False), ("nf4", False), ("nf4", True)):
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
        layer = load_and_quantize_model(build(), config).blocks[0].up
        back = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        errors[kind, double] = (back.float().cpu() - weight).abs().mean().item()
        sizes[kind, double] = layer.weight.nbytes + layer.weight.quant_state.absmax.nbytes
    assert errors["nf4", False] < errors["fp4", False]
    assert sizes["nf4", True] < sizes["nf4", False] < 0.16 * weight.nbytes


def test_the_compute_type_is_that_of_the_configuration(build) -> None:
    x = torch.randn(2, 64)
    outputs = {}
    for dtype in ("fp32", "bf16"):
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, torch_dtype="fp32")
        layer = load_and_quantize_model(build(), config).blocks[0].up
        with torch.no_grad():
            outputs[dtype] = layer(x)
    difference = (outputs["fp32"] - outputs["bf16"]).abs().max().item()
    assert 1e-5 < difference < 0.1


def test_what_is_not_quantized_has_the_type_that_was_asked_for(build, tmp_path) -> None:
    config = BnbQuantizationConfig(
        load_in_8bit=True,
        torch_dtype=torch.bfloat16,
        skip_modules=["head", "blocks.1.up"],
        keep_in_fp32_modules=["norm", "blocks.0.down"],
    )
    for model in (
        load_and_quantize_model(build(), config),
        load_and_quantize_model(empty(build), config, weights_location=save(build(), tmp_path / "whole")),
    ):
        types = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        assert (
            types["embed.weight"]
            == types["head.weight"]
            == types["scale"]
            == types["blocks.1.up.weight"]
            == torch.bfloat16
        )
        assert types["blocks.0.norm.weight"] == types["blocks.0.down.weight"] == torch.float32
        assert types["blocks.0.up.weight"] == torch.int8
        assert type(model.blocks[1].up) is nn.Linear and type(model.blocks[0].down) is nn.Linear


def test_an_empty_list_quantizes_the_output_layer_too(build, tokens) -> None:
    model = load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True, skip_modules=[]))
    assert model.head.weight.dtype == torch.int8
    assert similarity(run(model, tokens), run(build(), tokens)) > 0.999


def test_rows_of_any_number_are_quantized(tokens) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 14), nn.Linear(14, 6), nn.Linear(6, 5)).eval()
    x = torch.randn(3, 48)
    expected = model(x)
    quantized = load_and_quantize_model(
        model, BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", torch_dtype="fp32")
    )
    assert similarity(run(quantized, x), expected) > 0.9


def test_a_shared_weight_stays_shared(build, tokens, tmp_path) -> None:
    def tied():
        model = build(classes=50)
        model.head.weight = model.embed.weight
        return model

    model = load_and_quantize_model(tied(), BnbQuantizationConfig(load_in_8bit=True))
    assert model.head.weight is model.embed.weight
    assert similarity(run(model, tokens), run(tied(), tokens)) > 0.999


@every_config
def test_a_weight_that_was_shared_is_saved_and_loaded_as_two(kwargs, tokens, tmp_path) -> None:
    """The output layer is quantized, and the embedding that it shared its weight with is not."""

    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
        model[2].weight = model[0].weight
        return model

    config = BnbQuantizationConfig(**kwargs, skip_modules=[])
    quantized = load_and_quantize_model(tied(), config)
    again = load_and_quantize_model(empty(tied), config, weights_location=save(quantized, tmp_path))
    tokens = tokens % 64
    assert torch.equal(run(again, tokens), run(quantized, tokens))
    assert similarity(run(again, tokens), run(tied(), tokens)) > 0.95


def test_gradients_flow_through_frozen_layers_to_an_adapter(build, tokens) -> None:
    model = load_and_quantize_model(
        build(), BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32", bnb_4bit_compute_dtype="fp32")
    )
    adapter = nn.Linear(64, 64, bias=False)
    x = adapter(model.embed(tokens).detach())
    for block in model.blocks:
        x = block(x)
    x.sum().backward()
    assert adapter.weight.grad.abs().sum() > 0
    assert not model.blocks[0].up.weight.requires_grad


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device_map": {"embed": "cpu"}}, "blocks"),
        ({"device_map": "best"}, "device_map='best' is not one of auto, balanced"),
        ({"device_map": DISK}, "puts blocks.0, head on the disk: give offload_folder"),
    ],
)
def test_a_device_map_that_cannot_be_followed_changes_nothing(kwargs, message, build, tokens) -> None:
    model = build()
    expected = run(model, tokens)
    with pytest.raises(ConfigurationError, match=message):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True), **kwargs)
    torch.testing.assert_close(run(model, tokens), expected, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["skip_modules", "keep_in_fp32_modules"])
def test_a_name_that_no_module_has_is_logged(option, build, caplog) -> None:
    load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True, **{option: ["lm_haed"]}))
    assert f"{option}=['lm_haed']: Model has no module named 'lm_haed'" in caplog.text


def test_a_model_without_values_needs_a_checkpoint(build) -> None:
    with pytest.raises(ConfigurationError, match="values.*weights_location"):
        load_and_quantize_model(empty(build), BnbQuantizationConfig(load_in_8bit=True))


def test_a_model_is_quantized_once(build) -> None:
    model = load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True))
    with pytest.raises(ConfigurationError, match="has quantized layers already"):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True))


def test_a_model_whose_layers_are_all_skipped_is_refused(build) -> None:
    with pytest.raises(ConfigurationError, match="skip_modules.*keep_in_fp32_modules"):
        load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True, skip_modules=["blocks", "head"]))


def test_weights_that_are_no_numbers_to_compute_with_are_refused(build) -> None:
    model = build()
    model.blocks[0].up.weight = nn.Parameter(torch.ones(128, 64, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ConfigurationError, match="blocks.0.up has the dtype torch.int32"):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True))


def test_a_checkpoint_that_does_not_fit_changes_nothing(build, tmp_path) -> None:
    state = build().state_dict()
    for broken, message in (
        ({**state, "blocks.0.up.weight": torch.zeros(3, 3)}, "misshapen"),
        ({name: value for name, value in state.items() if name != "blocks.0.up.weight"}, "missing .1.: blocks.0.up"),
        ({**state, "blocks.0.up.weight": torch.zeros(128, 64, dtype=torch.uint8)}, "quantized with another method"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        model = empty(build)
        with pytest.raises(ConfigurationError, match=message):
            load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True), tmp_path)
        assert type(model.blocks[0].up) is nn.Linear and model.blocks[0].down.weight.is_meta


def test_a_layer_that_the_checkpoint_lacks_is_refused_even_if_the_model_has_values(build, tmp_path) -> None:
    state = {name: value for name, value in build().state_dict().items() if name != "blocks.0.up.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with (
        pytest.warns(UserWarning, match=r"missing \(1\): blocks.0.up.weight"),
        pytest.raises(ConfigurationError, match="of 1 layers.*blocks.0.up"),
    ):
        load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True), tmp_path)


def test_a_checkpoint_quantized_in_another_way_is_refused(build, tmp_path) -> None:
    def config(**kwargs):
        return BnbQuantizationConfig(**kwargs)

    eight = save(load_and_quantize_model(build(), config(load_in_8bit=True)), tmp_path / "8")
    four = save(load_and_quantize_model(build(), config(load_in_4bit=True)), tmp_path / "4")
    with pytest.raises(ConfigurationError, match="quantized with another method"):
        load_and_quantize_model(empty(build), config(load_in_4bit=True), eight)
    with pytest.raises(ConfigurationError, match=r"quantized|misshapen|not saved with load_in_8bit"):
        load_and_quantize_model(empty(build), config(load_in_8bit=True), four)
    with pytest.raises(ConfigurationError, match="bnb_4bit_quant_type='fp4'.*'nf4'"):
        load_and_quantize_model(empty(build), config(load_in_4bit=True, bnb_4bit_quant_type="nf4"), four)
    with pytest.raises(ConfigurationError, match="bnb_4bit_use_double_quant=False"):
        load_and_quantize_model(empty(build), config(load_in_4bit=True, bnb_4bit_use_double_quant=True), four)
    with pytest.raises(ConfigurationError, match="blocks.0.up.weight.*blocks.0.up"):
        load_and_quantize_model(empty(build), config(load_in_8bit=True, skip_modules=["head", "blocks.0"]), eight)


def test_a_4bit_checkpoint_without_its_description_is_refused(build, tmp_path) -> None:
    model = load_and_quantize_model(build(), BnbQuantizationConfig(load_in_4bit=True))
    state = {name: value.clone() for name, value in model.state_dict().items() if "bitsandbytes__" not in name}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match="a 4-bit weight"):
        load_and_quantize_model(empty(build), BnbQuantizationConfig(load_in_4bit=True), tmp_path)


def test_a_pickled_checkpoint_is_quantized_too(build, tokens, tmp_path) -> None:
    torch.save(build().state_dict(), tmp_path / "pytorch_model.bin")
    model = load_and_quantize_model(
        empty(build), BnbQuantizationConfig(load_in_8bit=True), tmp_path / "pytorch_model.bin"
    )
    expected = load_and_quantize_model(build(), BnbQuantizationConfig(load_in_8bit=True))
    torch.testing.assert_close(run(model, tokens), run(expected, tokens), rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
