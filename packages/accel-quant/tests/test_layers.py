from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_quant import BnbQuantizationConfig, get_keys_to_not_convert, has_4bit_bnb_layers, replace_with_bnb_layers
from accel_quant.quantizers.base import bitsandbytes_nn
from accel_state.errors import ConfigurationError

EIGHT = BnbQuantizationConfig(load_in_8bit=True)
FOUR = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def test_replaced_layers_quantize_their_weights_when_they_are_moved(build) -> None:
    import bitsandbytes  # takes seconds, which each worker that collects the tests would wait

    model = build()
    weight = model.blocks[0].up.weight.detach().clone()
    replaced = replace_with_bnb_layers(model, FOUR, ["head"])
    assert replaced is model
    assert isinstance(model.blocks[0].up, bitsandbytes.nn.Linear4bit) and type(model.head) is nn.Linear
    torch.testing.assert_close(model.blocks[0].up.weight.data, weight)
    model.to("cpu")
    assert model.blocks[0].up.weight.dtype == torch.uint8
    assert model.blocks[0].up.weight.quant_state.quant_type == "nf4"


def test_a_version_that_computes_wrong_outputs_is_refused(build, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    with monkeypatch.context() as patch:
        patch.setattr(bitsandbytes, "__version__", "0.46.1")
        bitsandbytes_nn.cache_clear()
        with pytest.raises(ConfigurationError, match=r"bitsandbytes 0\.46\.1 .*pip install 'bitsandbytes>=0\.47'"):
            replace_with_bnb_layers(build(), EIGHT)
    replace_with_bnb_layers(build(), EIGHT)


def test_replaced_layers_in_8_bits_have_the_threshold_and_no_gradient(build) -> None:
    import bitsandbytes  # takes seconds, which each worker that collects the tests would wait

    model = replace_with_bnb_layers(build(), EIGHT, ["head"]).to("cpu")
    layer = model.blocks[1].down
    assert isinstance(layer, bitsandbytes.nn.Linear8bitLt) and layer.state.threshold == 6.0
    assert layer.weight.dtype == torch.int8 and not layer.weight.requires_grad and layer.bias is None


def test_a_name_counts_from_the_larger_model(build) -> None:
    model = replace_with_bnb_layers(build(), EIGHT, ["encoder.head"], current_key_name=["encoder"])
    assert type(model.head) is nn.Linear and type(model.blocks[0].up) is not nn.Linear


def test_a_model_on_meta_stays_there(build) -> None:
    with init_empty_weights():
        model = build()
    replace_with_bnb_layers(model, FOUR)
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="torch.nn.Linear"):
        replace_with_bnb_layers(nn.Sequential(nn.LayerNorm(4)), EIGHT)


def test_has_4bit_layers(build) -> None:
    assert not has_4bit_bnb_layers(build())
    assert not has_4bit_bnb_layers(replace_with_bnb_layers(build(), EIGHT))
    assert has_4bit_bnb_layers(replace_with_bnb_layers(build(), FOUR))


def test_the_output_layer_and_what_shares_its_weight_is_not_converted(build) -> None:
    assert get_keys_to_not_convert(build()) == ["head"]
    assert get_keys_to_not_convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    tied = build(classes=50)
    tied.head.weight = tied.embed.weight
    assert get_keys_to_not_convert(tied) == ["embed", "head"]


def test_the_head_of_a_transformers_model_is_not_converted_and_a_base_model_is() -> None:
    transformers = pytest.importorskip("transformers")
    settings = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    config = transformers.BertConfig(**settings)
    assert get_keys_to_not_convert(transformers.BertModel(config)) == []
    masked = get_keys_to_not_convert(transformers.BertForMaskedLM(config))
    assert "cls" in masked and "bert.embeddings.word_embeddings" in masked
