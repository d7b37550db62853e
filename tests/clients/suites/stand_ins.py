"""A cache of the hub with stand-ins for the small models that clients' tests name: the same kinds, with random weights.

    HF_HUB_CACHE=DIRECTORY HF_HUB_OFFLINE=1 python stand_ins.py

The tests then run offline. What a stand-in answers is not what the real model would; both libraries get the same one.
"""

from __future__ import annotations

import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

COMMIT = "0" * 40
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
VOCABULARY = 1024
# Names of configuration classes differ in how they call the same sizes.
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**BERT, "num_key_value_heads": 2}
MOE = {**LLAMA, "head_dim": 8, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
OPT = {
    **{"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2},
    "num_attention_heads": 4,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    **{"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2},
}
CLIP = {**BERT, "projection_dim": 32, "max_position_embeddings": 77}

# By class: the sizes, and the names of the models.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "OPTForCausalLM": (
        OPT,
        "peft-internal-testing/opt-125m peft-internal-testing/tiny-random-OPTForCausalLM facebook/opt-125m "
        "facebook/opt-350m hf-internal-testing/tiny-random-OPTForCausalLM",
    ),
    "GPT2LMHeadModel": (
        GPT2,
        "peft-internal-testing/tiny-random-gpt2 peft-internal-testing/tiny-random-GPT2LMHeadModel "
        "hf-internal-testing/tiny-random-gpt2 openai-community/gpt2",
    ),
    "GPTJForCausalLM": ({**GPT2, "rotary_dim": 4}, "peft-internal-testing/tiny-random-GPTJForCausalLM"),
    "BloomForCausalLM": (
        {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        "peft-internal-testing/tiny-random-BloomForCausalLM",
    ),
    "LlamaForCausalLM": (
        LLAMA,
        "trl-internal-testing/tiny-random-LlamaForCausalLM peft-internal-testing/tiny-random-LlamaForCausalLM "
        "hf-internal-testing/tiny-random-LlamaForCausalLM",
    ),
    "LlamaForSequenceClassification": (LLAMA, "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2"),
    "MistralForCausalLM": (LLAMA, "hf-internal-testing/tiny-random-MistralForCausalLM"),
    "MixtralForCausalLM": ({**MOE, "num_local_experts": 4}, "hf-internal-testing/Mixtral-tiny"),
    "Qwen2ForCausalLM": (LLAMA, "peft-internal-testing/tiny-dummy-qwen2"),
    "Qwen3ForCausalLM": ({**LLAMA, "head_dim": 8}, "trl-internal-testing/tiny-Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": (
        {**MOE, "num_experts": 4, "moe_intermediate_size": 16},
        "trl-internal-testing/tiny-Qwen3MoeForCausalLM",
    ),
    "GptOssForCausalLM": ({**MOE, "num_local_experts": 4}, "trl-internal-testing/tiny-GptOssForCausalLM"),
    "Gemma3ForCausalLM": ({**LLAMA, "head_dim": 8}, "hf-internal-testing/tiny-random-Gemma3ForCausalLM"),
    "T5ForConditionalGeneration": (
        T5,
        "peft-internal-testing/tiny-random-t5 "
        "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated google/flan-t5-small",
    ),
    "BartForConditionalGeneration": (BART, "peft-internal-testing/tiny-random-BartForConditionalGeneration"),
    "BertModel": (BERT, "peft-internal-testing/tiny-random-BertModel"),
    "BertForSequenceClassification": (BERT, "peft-internal-testing/tiny-random-BertForSequenceClassification"),
    "RobertaModel": (BERT, "peft-internal-testing/tiny-random-RobertaModel"),
    "RobertaForSequenceClassification": (BERT, "peft-internal-testing/tiny-random-RobertaForSequenceClassification"),
    "DebertaModel": (BERT, "peft-internal-testing/tiny-random-DebertaModel"),
    "DebertaV2Model": (BERT, "peft-internal-testing/tiny-random-DebertaV2Model"),
    "CLIPTextModel": (CLIP, "peft-internal-testing/tiny-clip-text-2"),
}
SENTENCES = (
    "sentence-transformers/paraphrase-albert-small-v2",
    "sentence-transformers/paraphrase-MiniLM-L3-v2",
)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each printable character."""
    words = {word: index for index, word in enumerate((*SPECIAL, *string.printable))}
    built = Tokenizer(WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = Fuse()
    built.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built,
        model_max_length=128,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def model(kind: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    class_ = getattr(transformers, kind)
    return class_(class_.config_class(**{**SIZES, **sizes})).eval()


def publish(name: str, save: Callable[[Path], Any]) -> None:
    """Put what ``save`` writes into the cache, as a download of the model would be."""
    repository = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    save(snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")


def sentence_model(directory: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    with tempfile.TemporaryDirectory() as plain:
        model("AlbertModel", {**BERT, "embedding_size": 16}).save_pretrained(plain)
        tokenizer().save_pretrained(plain)
        words = Transformer(plain, max_seq_length=100)
        SentenceTransformer(modules=[words, Pooling(32)], device="cpu").save(str(directory))


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    for kind, (sizes, names) in MODELS.items():
        built = model(kind, sizes)
        for name in names.split():

            def save(directory: Path, built: Any = built) -> None:
                built.save_pretrained(directory)
                tokenizer().save_pretrained(directory)

            publish(name, save)
    for name in SENTENCES:
        publish(name, sentence_model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
