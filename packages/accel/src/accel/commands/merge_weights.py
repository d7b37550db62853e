"""``accel merge-weights``: merges the shards of a model, or an adapter and its base, into one or a few files."""

from __future__ import annotations

import argparse

from accel_state.command import Command


def run(argv: list[str]) -> int:
    """Merge the shards or the adapter, print the files that were written, and return 0."""
    parser = build_parser()
    options = parser.parse_args(argv)
    merge = _merge_shards if options.adapter is None else _merge_adapter
    for name in merge(parser, options):
        print(f"{options.output_path}/{name}")
    return 0


def _merge_shards(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.dtype is not None:
        parser.error("--dtype converts the weights that an adapter is merged into. Give --adapter, or leave it out.")
    from ..fsdp.merge import merge_fsdp_weights

    return merge_fsdp_weights(
        options.checkpoint_directory,
        options.output_path,
        safe_serialization=not options.unsafe_serialization,
        remove_checkpoint_dir=options.remove_checkpoint_dir,
        max_shard_size=options.max_shard_size,
    )


def _merge_adapter(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    for flag in ("unsafe_serialization", "remove_checkpoint_dir"):
        if getattr(options, flag):
            parser.error(f"--{flag} is for the shards of FSDP. Leave it out with --adapter.")
    from ..functions.merge_adapter import merge_adapter_weights

    return merge_adapter_weights(
        options.checkpoint_directory,
        options.adapter,
        options.output_path,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        "accel merge-weights",
        description="Merge the weights that FSDP saved with SHARDED_STATE_DICT, or a LoRA adapter into its base model.",
    )
    text = (
        "directory of the shards (pytorch_model_fsdp_0), or a checkpoint that contains it; with --adapter that of the "
        "base model"
    )
    parser.add_argument("checkpoint_directory", help=text)
    parser.add_argument("output_path", nargs="?", default=".", help="directory to write to (default: the current one)")
    for flag, text in (
        ("--unsafe_serialization", "write pytorch_model.bin instead of model.safetensors"),
        ("--remove_checkpoint_dir", "remove the directory of the shards afterwards"),
    ):
        parser.add_argument(flag, flag.replace("_", "-"), action="store_true", help=text)
    text = "maximum size of a file (default: %(default)s)"
    parser.add_argument("--max_shard_size", "--max-shard-size", default="10GB", help=text)
    parser.add_argument("--adapter", help="directory of a LoRA adapter that PEFT saved, to merge into the base model")
    text = "with --adapter: type of the merged weights (default: that of the base)"
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help=text)
    return parser


COMMAND = Command("merge the sharded weights of a model that was trained with FSDP, or an adapter and its base", run)
