"""The generators of many ranks in one archive: what is loaded is what each rank had."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import s3_server

from accel_checkpoint import CheckpointError, api, load, save, writer
from accel_checkpoint.manifest import Manifest
from accel_checkpoint.rank_files import RankPack
from accel_state import PartialState
from accel_state.testing import run_world


def drawn(place: str, above: int, resumes: bool) -> tuple[float, float]:
    """Numbers drawn after a state, and again after it was loaded."""
    rank = PartialState().process_index
    writer.PACKED_ABOVE = above
    torch.manual_seed(100 + rank)
    if not resumes:
        save({"step": 1}, place)
        first = torch.rand(()).item()
    else:
        first = -1.0
    load(place)
    return first, torch.rand(()).item()


def drawn_in_both_forms(folder: str, resumes: bool) -> list[tuple[float, float]]:
    return [drawn(f"{folder}/{above}", above, resumes) for above in (1, 64)]


def test_each_rank_continues_with_its_own_numbers(tmp_path: Path) -> None:
    """In one archive, or in a file for each rank."""
    both = run_world(drawn_in_both_forms, 4, str(tmp_path), False)
    # With more ranks: those that existed continue, and a new one has numbers of its own.
    more, again = (run_world(drawn_in_both_forms, 5, str(tmp_path), True) for _ in range(2))
    ranks = [f"random_states_{rank}.pkl" for rank in range(4)]
    for number, above in enumerate((1, 64)):
        place = tmp_path / str(above)
        drawn_numbers = [rank[number] for rank in both]
        assert all(first == second for first, second in drawn_numbers) and len(set(drawn_numbers)) == 4
        files = sorted(Manifest.read(place).files)  # type: ignore[union-attr]
        assert files == (["random_states.zip", "step.bin"] if above == 1 else [*ranks, "step.bin"])
        if above == 1:
            assert zipfile.ZipFile(place / "random_states.zip").namelist() == ranks
        assert [rank[number][1] for rank in more[:4]] == [second for _, second in drawn_numbers]
        assert more[4][number][1] not in [rank[number][1] for rank in more[:4]]
        assert again[4][number] == more[4][number]


@pytest.mark.slow  # a server and two ranks; files of ranks and saves into a store have fast tests
def test_in_a_store() -> None:
    with s3_server():
        place = "s3://bucket/packed"
        numbers = run_world(drawn, 2, place, 1, False)
        assert all(first == second for first, second in numbers) and len(set(numbers)) == 2


def test_damage_is_told(tmp_path: Path) -> None:
    place = str(tmp_path / "state")
    run_world(drawn, 2, place, 1, False)
    pack = Path(place, "random_states.zip")
    content = pack.read_bytes()
    pack.write_bytes(content[:-30])
    with pytest.raises(CheckpointError, match=r"random_states\.zip"):
        load(place)
    pack.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(CheckpointError, match=r"random_states\.zip"):
        load(place)
    pack.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"random_states_7\.pkl cannot be read"):
        RankPack(Path(place)).read("random_states_7.pkl")


class Runs:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(writer, "PACKED_ABOVE", 0)
    monkeypatch.setattr(api.rng_state, "capture_rng", lambda device: {"x": Runs()})
    save({"step": 1}, tmp_path / "state")
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"random_states\.zip/random_states_0\.pkl is not loaded"):
        load(tmp_path / "state")
    assert "this ran" not in capsys.readouterr().out
