"""accel-quant alone, with a plain module and a model of Transformers: outputs within the error of rounding."""

import importlib.util

import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

# Half of the largest gap between two values of NF4 (arXiv:2305.14314, appendix E), relative to a block's largest value.
NF4_ERROR = (1 - 0.6961928009986877) / 2
BLOCK = 64
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32", "torch_dtype": "fp32"}
EIGHT = {"load_in_8bit": True, "llm_int8_threshold": 0.0, "torch_dtype": "fp32"}


def build() -> nn.Sequential:
    """A module of no library; its last layer is not quantized."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10)).eval()


def quantized(weights: str, config: dict, **places) -> nn.Module:
    """The module, quantized while its weights are read."""
    with init_empty_weights():
        empty = build()
    return load_and_quantize_model(empty, BnbQuantizationConfig(**config), weights_location=weights, **places)


def error_of(x: torch.Tensor, weight: torch.Tensor, config: dict) -> torch.Tensor:
    """The largest error that rounding to the nearest value can make in ``x @ weight.T``."""
    x, weight = x.abs().double(), weight.abs().double()
    if config is FOUR:
        largest = weight.reshape(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(weight.shape)
        return x @ (NF4_ERROR * largest).T + 1e-5 * (x @ weight.T)
    # Rows of both are rounded to 127 steps, and products are in half precision.
    x_step, step = x.amax(1, keepdim=True) / 254, weight.amax(1, keepdim=True) / 254
    rounding = x @ step.expand_as(weight).T + x_step.expand_as(x) @ weight.T + x_step * step.T * x.shape[1]
    return rounding + 2**-9 * (x @ weight.T)


plain = build()
save_file(plain.state_dict(), "plain.safetensors")
x = torch.randn(16, 256)
with torch.no_grad():
    for bits, config in ((4, FOUR), (8, EIGHT)):
        model = quantized("plain.safetensors", config)
        assert type(model[0]) is not nn.Linear and type(model[2]) is nn.Linear
        hidden = model[0](x)
        error = (hidden - plain[0](x)).abs()
        assert error.max() > 0 and (error <= error_of(x, plain[0].weight, config)).all(), (bits, error.max())
        output = model(x)
        assert torch.equal(output, plain[2](plain[1](hidden))), "other layers are those of plain PyTorch"
        save_file(model.state_dict(), "quantized.safetensors")
        assert torch.equal(quantized("quantized.safetensors", config)(x), output)
        offloaded = quantized("quantized.safetensors", config, device_map={"0": "disk", "2": "cpu"}, offload_folder="o")
        assert torch.equal(offloaded(x), output)
        size = sum(value.nbytes for value in model[0].state_dict().values()) / plain[0].weight.nbytes
        print(f"plain module in {bits} bits: {size:.0%} of the memory, errors within rounding; reloaded: bit-equal")

    if importlib.util.find_spec("transformers"):
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        llama = AutoConfig.for_model("llama", vocab_size=256, **shape)
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(llama).eval()
        expected.save_pretrained("llama")
        tokens = torch.randint(256, (2, 16))
        similar = []
        for config in (FOUR, EIGHT):
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(llama).eval()
            model = load_and_quantize_model(model, BnbQuantizationConfig(**config), weights_location="llama")
            kept = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
            assert kept == {"lm_head"}, kept
            logits = model(tokens).logits
            similar.append(torch.cosine_similarity(logits, expected(tokens).logits, dim=-1).min().item())
        assert similar[0] > 0.9 and similar[1] > 0.999, similar
        print(f"Llama of Transformers: cosine similarity {similar[0]:.3f} in 4 bits, {similar[1]:.4f} in 8")
