"""Logged values are those at the time of the call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from accel_state import ConfigurationError
from accel_state.testing import run_world
from accel_track.snapshot import Snapshot

np = pytest.importorskip("numpy")


def test_changes_after_the_call_are_not_seen() -> None:
    values = {
        "scalar": torch.tensor(1.0),
        "one": torch.tensor([[2]]),
        "a": torch.tensor([1.0, 2.0]),
        "b": torch.tensor([3.0, 4.0]),
        "array": np.array([1, 2]),
        "nested": {"t": torch.tensor(5), "list": [torch.tensor(6), (torch.zeros(2), 7)]},
    }
    snapshot = Snapshot(values)
    values["scalar"].zero_()
    values["one"].zero_()
    values["a"].zero_()
    values["b"].zero_()
    values["array"][:] = 0
    values["nested"]["t"].zero_()
    values["nested"]["list"][0].zero_()
    values["nested"]["list"].append(1)
    values["nested"]["new"] = 1
    taken = snapshot.values()
    assert taken["scalar"] == 1.0 and taken["one"].tolist() == [[2]] and taken["a"].tolist() == [1.0, 2.0]
    assert taken["b"].tolist() == [3.0, 4.0] and taken["array"].tolist() == [1, 2]
    assert taken["nested"]["t"] == 5 and taken["nested"]["list"][0] == 6 and len(taken["nested"]["list"]) == 2
    assert set(taken["nested"]) == {"t", "list"} and taken["nested"]["list"][1][0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", "float64 float32 float16 bfloat16 int8 int64 bool complex64".split())
def test_kinds_are_kept(name: str) -> None:
    dtype = getattr(torch, name)
    scalar, vector = torch.tensor([1], dtype=dtype), torch.ones(3, dtype=dtype)
    taken = Snapshot({"scalar": scalar, "vector": vector}).values()
    assert taken["scalar"].dtype is dtype and torch.equal(taken["scalar"], scalar)
    assert taken["vector"].dtype is dtype and torch.equal(taken["vector"], vector)


def test_no_graph_is_kept_alive() -> None:
    weight = torch.ones(3, requires_grad=True)
    taken = Snapshot({"loss": (weight * 2).sum(), "vector": weight * 2}).values()
    assert not taken["vector"].requires_grad and not taken["loss"].requires_grad and taken["loss"] == 6.0


def test_unusual_tensors() -> None:
    sparse = torch.eye(2).to_sparse()
    taken = Snapshot(
        {"sparse": sparse, "empty": torch.zeros(0), "parameter": torch.nn.Parameter(torch.ones(2)), 3: 1}
    ).values()
    assert torch.equal(taken["sparse"].to_dense(), torch.eye(2)) and taken["empty"].shape == (0,)
    assert taken["parameter"].tolist() == [1.0, 1.0] and taken["3"] == 1
    # Without a value, there is nothing to fetch; the tracker would be lost with it.
    assert Snapshot({"meta": torch.zeros(1, device="meta")}).values() == {
        "meta": "tensor(shape=(1,), dtype=float32, device=meta)"
    }


def test_many_threads_may_ask() -> None:
    snapshot = Snapshot({str(number): torch.full((4,), float(number)) for number in range(50)})
    results: list[dict] = []
    threads = [threading.Thread(target=lambda: results.append(snapshot.values())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(result[str(n)].tolist() == [float(n)] * 4 for result in results for n in range(50))
    results[0].clear()
    assert results[1]


def sharded_tensors() -> tuple[list[float], str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.tensor([1.0, 2.0]), mesh, [Replicate()])
    part = DTensor.from_local(torch.tensor([1.0, 2.0]), mesh, [Shard(0)])
    taken = Snapshot({"whole": whole}).values()["whole"].tolist()
    with pytest.raises(ConfigurationError) as error:
        Snapshot({"part": part})
    return taken, str(error.value)


def test_tensors_of_a_mesh() -> None:
    for taken, message in run_world(sharded_tensors, 2):
        assert taken == [1.0, 2.0]
        assert "is sharded over processes" in message and "Log tensor.full_tensor()" in message
