"""``accel merge-weights``: the shards of a model into one file, or a few."""

from __future__ import annotations

import argparse

from accel_launch.commands.base import Command


def run(argv: list[str]) -> int:
    """Merge, and say what was written.

    Returns:
        0.

    Raises:
        ConfigurationError: there are no shards in the folder.
        CheckpointError: they are damaged.
    """
    options = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "accel merge-weights", description="Merge the shards that FSDP's SHARDED_STATE_DICT has written."
    )
    parser.add_argument(
        "checkpoint_directory", help="the folder of the shards (pytorch_model_fsdp_0), or a checkpoint that has one"
    )
    parser.add_argument("output_path", nargs="?", default=".", help="the folder to write to (default: the current one)")
    for flag, words in (
        ("--unsafe_serialization", "write pytorch_model.bin rather than model.safetensors"),
        ("--remove_checkpoint_dir", "remove the folder of the shards afterwards"),
    ):
        parser.add_argument(flag, flag.replace("_", "-"), action="store_true", help=words)
    parser.add_argument(
        "--max_shard_size", "--max-shard-size", default="10GB", help="largest file to write (default: %(default)s)"
    )
    return parser


COMMAND = Command("merge the shards of a model that was trained with FSDP", run)
