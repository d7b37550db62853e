"""``accel merge-weights``: merges the shards of a model into one or a few files."""

from __future__ import annotations

import argparse

from accel_state.command import Command


def run(argv: list[str]) -> int:
    """Merge the shards, print the files that were written, and return 0."""
    options = build_parser().parse_args(argv)
    from ..fsdp.merge import merge_fsdp_weights

    written = merge_fsdp_weights(
        options.checkpoint_directory,
        options.output_path,
        safe_serialization=not options.unsafe_serialization,
        remove_checkpoint_dir=options.remove_checkpoint_dir,
        max_shard_size=options.max_shard_size,
    )
    for name in written:
        print(f"{options.output_path}/{name}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        "accel merge-weights", description="Merge the weights that FSDP saved with SHARDED_STATE_DICT."
    )
    text = "directory of the shards (pytorch_model_fsdp_0), or a checkpoint that contains it"
    parser.add_argument("checkpoint_directory", help=text)
    parser.add_argument("output_path", nargs="?", default=".", help="directory to write to (default: the current one)")
    for flag, text in (
        ("--unsafe_serialization", "write pytorch_model.bin instead of model.safetensors"),
        ("--remove_checkpoint_dir", "remove the directory of the shards afterwards"),
    ):
        parser.add_argument(flag, flag.replace("_", "-"), action="store_true", help=text)
    text = "maximum size of a file (default: %(default)s)"
    parser.add_argument("--max_shard_size", "--max-shard-size", default="10GB", help=text)
    return parser


COMMAND = Command("merge the sharded weights of a model that was trained with FSDP", run)
