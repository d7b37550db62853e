"""``accel megatron``: writes the datasets that Megatron-core reads, and converts checkpoints of Megatron-LM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError

FORMATS = ("torch", "torch_dist")


def run(argv: list[str]) -> int:
    """Run ``accel megatron data`` or ``accel megatron convert``."""
    options = _parser().parse_args(argv)
    done: int = options.run(options)
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("accel megatron", description="Datasets and checkpoints of Megatron-LM.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "write PREFIX.bin and PREFIX.idx from texts"
    data = actions.add_parser("data", help=text, description=f"{text.capitalize()}.")
    data.add_argument("input", nargs="+", metavar="TEXT", help="files: JSON lines (.jsonl), or texts of paragraphs")
    data.add_argument("prefix", metavar="PREFIX", help="path of the files to write, without suffix")
    data.add_argument("--tokenizer", required=True, help="name or directory of a tokenizer of Transformers")
    data.add_argument("--key", default="text", help="key of the text in JSON lines (default: %(default)s)")
    data.add_argument(
        "--split_sentences",
        action="store_true",
        help="write the sentences of a text one by one, as Megatron-BERT and T5 need them",
    )
    data.set_defaults(run=_data)
    text = "convert checkpoints between Megatron-LM and Transformers"
    convert = actions.add_parser(
        "convert",
        help=text,
        description=f"{text.capitalize()}. A SOURCE with mp_rank_... folders, or of dist_checkpointing, is of "
        "Megatron-LM, and one with model.safetensors is of Transformers; TARGET gets the other format.",
    )
    convert.add_argument("source", metavar="SOURCE", type=Path, help="the checkpoint to read")
    convert.add_argument("target", metavar="TARGET", type=Path, help="the folder to write, new or empty")
    convert.add_argument("--config", help="name or folder of the Transformers configuration (default: SOURCE)")
    convert.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="of Megatron-LM, to write: a file for each rank, or dist_checkpointing, for any parallel sizes (default: "
        "%(default)s)",
    )
    convert.add_argument(
        "--optimizer", action="store_true", help="convert the state of AdamW too (of the format torch_dist)"
    )
    convert.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as it is)")
    convert.add_argument("--max_shard_size", default="5GB", help="of files of Transformers (default: %(default)s)")
    convert.add_argument(
        "--trust_checkpoint", action="store_true", help="unpickle any object of SOURCE, which can run code"
    )
    for name, default, help_text in (
        ("tp_degree", 1, "tensor-parallel size"),
        ("pp_degree", 1, "number of stages"),
        ("expert_model_parallel_size", 1, "expert-parallel size"),
        ("decoder_last_pipeline_num_layers", None, "layers of the last stage"),
        ("num_layers_per_virtual_pipeline_stage", None, "interleave stages of this many layers"),
        ("make_vocab_size_divisible_by", 128, "pad the vocabulary to a multiple of this times tp_degree"),
    ):
        shown = f" (default: {default})" if default else ""
        convert.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=help_text + shown)
    convert.set_defaults(run=_convert)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _convert(options: argparse.Namespace) -> int:
    import torch

    from .convert import is_megatron, to_megatron, to_transformers

    source: Path = options.source
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if options.dtype is not None and options.dtype not in dtypes:
        raise ConfigurationError(f"--dtype {options.dtype} is not one of {', '.join(dtypes)}.")
    shared: dict[str, Any] = {"dtype": dtypes.get(options.dtype), "optimizer": options.optimizer}
    if not source.is_dir():
        raise ConfigurationError(f"SOURCE {source} is not a folder (looked in {Path.cwd()}).")
    if is_megatron(source):
        config = options.config or str(source)
        if options.config is None and not (source / "config.json").is_file():
            raise ConfigurationError(
                f"{source} has no config.json: a checkpoint of Megatron-LM does not say which model of Transformers it "
                "is. Name a configuration with --config, for example --config gpt2."
            )
        written = to_transformers(
            source, options.target, config, options.max_shard_size, trust=options.trust_checkpoint, **shared
        )
    else:
        written = to_megatron(
            source,
            options.target,
            options.config or str(source),
            kind=options.format,
            tp=options.tp_degree,
            pp=options.pp_degree,
            ep=options.expert_model_parallel_size,
            last=options.decoder_last_pipeline_num_layers,
            per_chunk=options.num_layers_per_virtual_pipeline_stage,
            multiple=options.make_vocab_size_divisible_by,
            **shared,
        )
    for name in written:
        print(f"wrote {options.target / name}")
    return 0


def _data(options: argparse.Namespace) -> int:
    for path in options.input:
        if not Path(path).is_file():
            raise ConfigurationError(f"{path} is not a file. Give text or .jsonl files, then the prefix to write.")
    from transformers import AutoTokenizer

    from .data import read_documents, write_dataset

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    eod = None if options.split_sentences else tokenizer.eos_token_id
    if eod is None and not options.split_sentences:
        raise ConfigurationError(f"the tokenizer {options.tokenizer} has no eos_token, which ends each document.")
    documents = (text for path in options.input for text in read_documents(Path(path), options.key))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    count, tokens = write_dataset(documents, options.prefix, encode, eod, len(tokenizer))
    print(f"{options.prefix}.bin: {count} documents, {tokens} tokens")
    return 0


COMMAND = Command("write datasets of Megatron-core, and convert checkpoints of Megatron-LM", run)
