"""Small models of many architectures of Transformers and diffusers, with inputs for each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY, TOKENS, BATCH, IMAGE = 101, 7, 2, 32
_COMMON = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {
    **{**_COMMON, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_SEQ2SEQ = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": VOCABULARY},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "forced_eos_token_id": None,
}
_T5 = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_RELATIVE = {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
_VISION = {**_COMMON, "image_size": IMAGE, "patch_size": 8, "num_channels": 3}
_SPEECH = {
    **{**_COMMON, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY},
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LLAMA = {"model_type": "llama", **_TEXT}
_CLIP_VISION = {"model_type": "clip_vision_model", **_VISION}
_UNET_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}

Inputs = dict[str, Any]
Rng = torch.Generator


@dataclass(frozen=True)
class Architecture:
    """A small model.

    Attributes:
        name: as rows are named, such as "llama" or "FluxTransformer2DModel".
        library: "transformers" or "diffusers".
        head: the Auto class that builds it; for diffusers, the class itself.
        settings: of its configuration.
        inputs: make the arguments of a forward from a random generator.
        model_type: as Transformers names it; the name by default.
    """

    name: str
    library: str
    head: str
    settings: Mapping[str, Any]
    inputs: Callable[[Rng], Inputs] = field(repr=False)
    model_type: str = ""

    def is_installed(self) -> bool:
        """True if its library is installed."""
        return importlib.util.find_spec(self.library) is not None

    def build(self) -> nn.Module:
        """Build the model in eval mode; the caller seeds."""
        if self.library == "diffusers":
            import diffusers

            model: nn.Module = getattr(diffusers, self.head)(**self.settings)
            return model.eval()
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type or self.name, **self.settings)
        built: nn.Module = getattr(transformers, self.head).from_config(config)
        return built.eval()


def _ids(rng: Rng, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=rng)


def _tokens(rng: Rng) -> Inputs:
    return {"input_ids": _ids(rng), "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.int64)}


def _tokens_alone(rng: Rng) -> Inputs:
    return {"input_ids": _ids(rng)}


def _pairs(rng: Rng) -> Inputs:
    return {**_tokens(rng), "decoder_input_ids": _ids(rng)}


def _pixels(rng: Rng, size: int = IMAGE) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=rng)}


def _tokens_and_pixels(rng: Rng) -> Inputs:
    return {**_tokens(rng), **_pixels(rng)}


def _image_prompt(rng: Rng) -> Inputs:
    """Prompts of LLaVA and its relatives: 16 image tokens (number 100), then text that has none of them."""
    image = torch.full((BATCH, 16), VOCABULARY - 1)
    ids = torch.cat([image, _ids(rng).clamp(max=VOCABULARY - 2)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_pixels(rng)}


def _wave(rng: Rng) -> Inputs:
    return {"input_values": torch.randn(BATCH, 800, generator=rng)}


def _mel(frames: int) -> Callable[[Rng], Inputs]:
    def inputs(rng: Rng) -> Inputs:
        features = torch.randn(BATCH, 16, frames, generator=rng)
        return {"input_features": features, "decoder_input_ids": _ids(rng, 3)}

    return inputs


def _tensors(**shapes: tuple[int, ...]) -> Callable[[Rng], Inputs]:
    """Random tensors by argument; the argument ``timestep`` gets a number."""

    def inputs(rng: Rng) -> Inputs:
        found = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
        if "timestep" in found:
            found["timestep"] = torch.randint(1, 900, shapes["timestep"], generator=rng)
        return found

    return inputs


def _transformers(
    head: str, inputs: Callable[[Rng], Inputs], base: Mapping[str, Any], *names: str, **settings: Any
) -> list[Architecture]:
    """Architectures of Transformers that one configuration fits; ``model_type:suffix`` gives a row another name."""
    found = []
    for name in names:
        found.append(Architecture(name, "transformers", head, {**base, **settings}, inputs, name.split(":")[0]))
    return found


def _diffusers(name: str, inputs: Callable[[Rng], Inputs], **settings: Any) -> Architecture:
    return Architecture(name, "diffusers", name, settings, inputs)


def _flux_inputs(rng: Rng) -> Inputs:
    made = _tensors(hidden_states=(1, 16, 4), encoder_hidden_states=(1, 6, 32), pooled_projections=(1, 32))(rng)
    ids = {"txt_ids": torch.zeros(6, 3), "img_ids": torch.randn(16, 3, generator=rng)}
    return {**made, **ids, "timestep": torch.tensor([0.7])}


_CAUSAL = "AutoModelForCausalLM"

ARCHITECTURES: list[Architecture] = [
    # Decoders, whose head is often the embedding; with mixtures of experts and state-space models.
    *_transformers(
        _CAUSAL,
        _tokens,
        _TEXT,
        *("apertus", "arcee", "beam", "bert", "bert-generation", "big_bird", "biogpt", "bitnet", "bloom", "cohere"),
        *("cohere2", "ctrl", "cwm", "diffllama", "doge", "electra", "ernie", "ernie4_5", "exaone4", "gemma", "gemma2"),
        *("gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "granite", "helium"),
        *("hunyuan_v1_dense", "jais2", "llama", "ministral", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "opt"),
        *("persimmon", "phi", "phi3", "qwen2", "qwen3", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2"),
        *("xglm", "falcon_mamba", "mamba", "rwkv", "lfm2", "vaultgemma", "openai-gpt"),
    ),
    *_transformers(
        _CAUSAL,
        _tokens,
        {**_TEXT, **_MOE},
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "phimoe", "aria_text", "flex_olmo"),
        *("llama4_text", "jetmoe", "minimax"),
    ),
    *_transformers(_CAUSAL, _tokens, _TEXT, "gptj", "codegen", rotary_dim=4),
    *_transformers(_CAUSAL, _tokens, _TEXT, "mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2),
    *_transformers(_CAUSAL, _tokens, _TEXT, "recurrent_gemma", num_hidden_layers=3, lru_width=32),
    Architecture(
        "gpt_neo",
        "transformers",
        _CAUSAL,
        {**_TEXT, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        _tokens,
    ),
    Architecture(
        "falcon",
        "transformers",
        _CAUSAL,
        {key: value for key, value in _TEXT.items() if key not in ("head_dim", "num_key_value_heads")},
        _tokens,
    ),
    *_transformers(_CAUSAL, _tokens, {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}, "mpt"),
    *_transformers(_CAUSAL, _tokens, {**_RELATIVE, "n_layer": 2}, "xlnet"),
    # Encoders.
    *_transformers(
        "AutoModelForMaskedLM",
        _tokens,
        {**_TEXT, "embedding_size": 32},
        *("albert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "esm", "ibert", "layoutlm"),
        *("megatron-bert", "modernbert", "mpnet", "nystromformer", "rembert", "roformer", "roc_bert", "squeezebert"),
        *("xlm-roberta", "camembert:masked"),
    ),
    *_transformers("AutoModelForMaskedLM", _tokens, _TEXT, "longformer", attention_window=4),
    *_transformers("AutoModel", _tokens_alone, _TEXT, "fnet"),
    *_transformers("AutoModel", _tokens, _TEXT, "canine", "splinter"),
    *_transformers("AutoModel", _tokens, _TEXT, "xmod", languages=("en_XX",), default_language="en_XX"),
    *_transformers("AutoModelForMaskedLM", _tokens, {**_RELATIVE, "block_sizes": [1, 1]}, "funnel"),
    # Encoder and decoder.
    *_transformers(
        "AutoModelForSeq2SeqLM",
        _pairs,
        _SEQ2SEQ,
        *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "pegasus_x"),
        *("plbart", "led", "bigbird_pegasus"),
    ),
    *_transformers("AutoModelForSeq2SeqLM", _pairs, _T5, "t5", "mt5", "umt5", "longt5"),
    *_transformers(
        "AutoModelForSpeechSeq2Seq",
        _mel(40),
        _SEQ2SEQ,
        "whisper",
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    # Images.
    *_transformers(
        "AutoModelForImageClassification",
        _pixels,
        _VISION,
        *("vit", "beit", "dinov2", "dinov2_with_registers", "vit_msn", "data2vec-vision", "ijepa"),
    ),
    *_transformers(
        "AutoModelForImageClassification",
        _pixels,
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "num_stages": 2},
        *("resnet", "convnext", "convnextv2", "regnet"),
    ),
    *_transformers(
        "AutoModelForImageClassification",
        _pixels,
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        *("swin", "swinv2"),
    ),
    *_transformers(
        "AutoModelForSemanticSegmentation",
        _pixels,
        {},
        "segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    # Speech.
    *_transformers("AutoModelForCTC", _wave, _SPEECH, "wav2vec2", "hubert", "wavlm", "unispeech", "data2vec-audio"),
    # Images and text.
    *_transformers(
        "AutoModel",
        _tokens_and_pixels,
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
        *("clip", "siglip", "altclip", "chinese_clip", "metaclip_2"),
    ),
    *_transformers(
        "AutoModelForImageTextToText",
        _image_prompt,
        {"text_config": _LLAMA, "vision_config": _CLIP_VISION, "image_token_id": 100, "image_token_index": 100},
        *("llava", "vipllava"),
        vision_feature_layer=-1,
        vision_feature_layers=[-1, -2],
    ),
    *_transformers("AutoModel", _tokens_and_pixels, {**_VISION, **_TEXT}, "vilt"),
    # diffusers
    _diffusers(
        "UNet2DConditionModel",
        _tensors(sample=(1, 4, 16, 16), timestep=(1,), encoder_hidden_states=(1, 5, 32)),
        **_UNET_BLOCKS,
        sample_size=16,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    _diffusers(
        "UNet2DModel",
        _tensors(sample=(1, 3, 16, 16), timestep=(1,)),
        **_UNET_BLOCKS,
        sample_size=16,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusers(
        "AutoencoderKL",
        _tensors(sample=(1, 3, 16, 16)),
        **_UNET_BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "VQModel",
        _tensors(sample=(1, 3, 16, 16)),
        **_UNET_BLOCKS,
        num_vq_embeddings=32,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "AutoencoderTiny",
        _tensors(sample=(1, 3, 32, 32)),
        encoder_block_out_channels=(16,) * 4,
        decoder_block_out_channels=(16,) * 4,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        _flux_inputs,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
    _diffusers(
        "SD3Transformer2DModel",
        _tensors(
            hidden_states=(1, 4, 8, 8), encoder_hidden_states=(1, 5, 32), pooled_projections=(1, 64), timestep=(1,)
        ),
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        lambda rng: {
            **_tensors(hidden_states=(1, 4, 8, 8), encoder_hidden_states=(1, 5, 32), timestep=(1,))(rng),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
        sample_size=8,
        use_additional_conditions=False,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        lambda rng: {
            **_tensors(hidden_states=(1, 4, 8, 8), timestep=(1,))(rng),
            "class_labels": torch.randint(0, 10, (1,), generator=rng),
        },
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_type="ada_norm_zero",
        activation_fn="gelu-approximate",
    ),
    _diffusers(
        "CogVideoXTransformer3DModel",
        _tensors(hidden_states=(1, 1, 4, 8, 8), encoder_hidden_states=(1, 8, 16), timestep=(1,)),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        max_text_seq_length=8,
    ),
    _diffusers(
        "PriorTransformer",
        _tensors(hidden_states=(1, 16), timestep=(1,), proj_embedding=(1, 16), encoder_hidden_states=(1, 7, 16)),
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=7,
        additional_embeddings=4,
    ),
    _diffusers(
        "WanTransformer3DModel",
        _tensors(hidden_states=(1, 4, 2, 8, 8), timestep=(1,), encoder_hidden_states=(1, 6, 16)),
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    ),
]
"""Every architecture, in the order of the table."""
