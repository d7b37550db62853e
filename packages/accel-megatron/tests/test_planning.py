"""The plan of a rank is what a real run holds and sends."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytest.importorskip("accel_plan")

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "no", {"tp_degree": 2}),
    ("llama", "no", {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2}),
    ("llama", "bf16", {"use_distributed_optimizer": True}),
    ("gpt2", "no", {"tp_degree": 2, "sequence_parallelism": True}),
    ("gpt2", "no", {"pp_degree": 2, "num_micro_batches": 2}),
    ("llama", "no", {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}),
    ("qwen3", "no", {"pp_degree": 2, "num_micro_batches": 2, "decoder_last_pipeline_num_layers": 1}),
    ("llama", "no", {"context_parallel_size": 2}),
    (
        "llama",
        "no",
        {"tp_degree": 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("megatron-bert", "no", {"tp_degree": 2, "sequence_parallelism": True}),
    ("megatron-bert", "no", {"pp_degree": 2, "num_micro_batches": 2}),
    ("t5", "no", {"tp_degree": 2}),
    ("t5", "no", {"tp_degree": 2, "sequence_parallelism": True}),
    ("t5", "no", {"pp_degree": 2, "num_micro_batches": 2}),
    ("t5-gated", "no", {"use_distributed_optimizer": True}),
    ("mixtral", "no", {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}),
    ("mixtral", "no", {"tp_degree": 2, "sequence_parallelism": True}),
    ("mixtral", "bf16", {"pp_degree": 2, "num_micro_batches": 2}),
    ("mixtral", "no", {"context_parallel_size": 2}),
    ("mixtral", "no", {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
]


class Held:
    """A saved tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved:
    """Counts the bytes of the tensors that are saved for the backward pass, and the most at once."""

    def __init__(self, weights: set[int]) -> None:
        self.weights, self.storages, self.now, self.most = weights, {}, 0, 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.weights or not storage.nbytes():
            return tensor
        if key not in self.storages:
            self.storages[key] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        self.storages[key][0] += 1
        held = Held(tensor)
        weakref.finalize(held, self.release, key)
        return held

    def release(self, key: int) -> None:
        entry = self.storages[key]
        entry[0] -= 1
        if not entry[0]:
            self.now -= entry[1]
            del self.storages[key]

    @staticmethod
    def unpack(held: Any) -> torch.Tensor:
        return held.tensor if isinstance(held, Held) else held


def measure(cases: list[Any]) -> list[Any]:
    """Planned and real bytes and messages of this rank."""
    import torch.distributed as dist

    from accel_megatron.planning import plan_plugin
    from accel_megatron.testing import cuda_on_cpu
    from accel_plan.record import Recorder, add_traffic

    cuda_on_cpu()
    found: list[Any] = []
    for name, precision, plugin in cases:
        run = matrix.Run(name, precision, **plugin)
        batch = matrix.batches(name, 1, run.vocab_size)[0]
        run.step(batch)  # optimizer states are created in the first step
        with torch.device("meta"):
            kind, config = matrix.models()[name]
            model = kind(config)
        ranks = run.accelerator.strategy.data_collectives.world_size
        planned = plan_plugin(
            run.model.plugin,
            model,
            processes=dist.get_world_size(),
            rank=dist.get_rank(),
            batch_size=matrix.ROWS // ranks // run.model.plugin.num_micro_batches,
            seq_length=matrix.SEQUENCE,
            mixed_precision=precision,
            device="cpu",
        )
        parameters = list(run.model.parameters())
        saved = Saved({item.untyped_storage().data_ptr() for item in parameters})
        recorder = Recorder(planned["axes"])
        with recorder, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            run.step(batch)
        # Small messages are left out. Those of experts are of different sizes, around that of a kilobyte.
        least = {"all-to-all": 256}
        seen = [item for item in recorder._traffic if item.ranks > 1 and item.payload >= least.get(item.kind, 1024)]
        traffic = add_traffic([(1, seen)])
        real = {
            "weights": sum(item.nbytes for item in parameters),
            "gradients": sum(
                buffer.grad_data.nbytes
                for chunk in run.model.chunks
                for buffer in chunk.buffers + chunk.expert_parallel_buffers
            ),
            "optimizer": state_bytes(run.model.optimizer, precision),
            "activations": saved.most,
        }
        sent: dict[Any, list[int]] = {}
        for kind, axis, count, calls, payload in planned["collectives"]:
            entry = sent.setdefault((kind, axis, count), [0, 0])
            entry[0] += calls
            entry[1] += payload
        found.append(
            {
                "memory": (planned["memory"], real),
                "messages": (
                    {key: tuple(value) for key, value in sent.items()},
                    {(item.kind, item.axis, item.ranks): (item.calls, item.payload) for item in traffic},
                ),
            }
        )
        run.close()
    return found


def state_bytes(optimizer: Any, precision: str) -> int:
    """Bytes of Adam's moments, and of the float32 weights of a half-precision model."""
    total = 0
    for main in optimizer.mains.values():
        if main.main is None:
            continue
        total += sum(main.state(key).nbytes for key in optimizer.keys)
        total += main.main.nbytes if precision != "no" else 0
    return total


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accel_plan.command import run

    matrix.create("llama").config.save_pretrained(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmixed_precision: bf16\nmegatron_lm_config:\n"
        "  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n  megatron_lm_num_micro_batches: 2\n"
    )
    assert run([str(config), "--model", str(tmp_path), "--rank", "5", "--batch_size", "3"]) == 0
    printed = capsys.readouterr().out
    assert "megatron on 8 processes, mixed precision: bf16\nrank 5: pp 1 of 2, dp 0 of 2, tp 1 of 2" in printed
    assert "data rank 0 of 2; samples 0, 1, 2, 3, 4, 5 of the first 12" in printed
    for options, message in (
        (["--megatron_lm_tp_degree", "3"], "not a multiple of megatron_lm_tp_degree=3 x megatron_lm_pp_degree=2"),
        (
            ["--num_processes", "16", "--megatron_lm_tp_degree", "4"],
            "tp_degree=4 does not divide the 2 key-value heads",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run([str(config), "--model", str(tmp_path), *options])
    matrix.create("mixtral").config.save_pretrained(tmp_path)
    for options, message in (
        (["--megatron_lm_expert_tensor_parallel_size", "1"], "expert_tensor_parallel_size=1, and .*tp_degree=2"),
        (["--megatron_lm_use_custom_fsdp", "true", "--megatron_lm_pp_degree", "1"], "does not count what .*FSDP"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run([str(config), "--model", str(tmp_path), *options])


def differences(cases: list[Any]) -> list[Any]:
    """What the plan and a run disagree on."""
    different: list[Any] = []
    everything = run_world(measure, 2, cases, timeout=180)
    for number, case in enumerate(cases):
        results = [found[number] for found in everything]
        for rank, result in enumerate(results):
            planned, real = result["memory"]
            for part, value in real.items():
                if abs(planned[part] - value) > 0.1 * value:
                    different.append((rank, case, part, planned[part], value))
        # What a rank sends back to others depends on which experts its tokens choose; all ranks together do not.
        sums = [add(result["messages"][side] for result in results) for side in (0, 1)]
        for rank, (planned, real) in [("all", sums), *enumerate(result["messages"] for result in results)]:
            for key in planned.keys() | real.keys():
                calls, payload = planned.get(key, (0, 0))
                real_calls, real_payload = real.get(key, (0, 0))
                differs = abs(payload - real_payload) > 0.02 * real_payload
                if calls != real_calls or (differs and (key[0] != "all-to-all" or rank == "all")):
                    different.append((rank, case, key, (calls, payload), (real_calls, real_payload)))
    return different


def add(messages: Any) -> dict[Any, tuple[int, int]]:
    total: dict[Any, tuple[int, int]] = {}
    for each in messages:
        for key, value in each.items():
            calls, payload = total.get(key, (0, 0))
            total[key] = calls + value[0], payload + value[1]
    return total


@pytest.mark.timeout(200)
def test_the_plan_is_what_a_run_holds_and_sends() -> None:
    different = differences(CASES)
    assert not different, "\n".join(map(str, different))


@pytest.mark.timeout(200)
def test_other_architectures() -> None:
    different = differences(OTHERS)
    assert not different, "\n".join(map(str, different))
