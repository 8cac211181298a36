"""What ranks tell each other, on three real gloo processes: values arrive as they were, and a peer's bytes are never run."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from sft_play.training import ranks
from tests.pickles import Evil

WORLD = 3
VALUES = [{"rank": 0, "text": "ä\n" * 500, "none": None}, [1.5, float("inf")], "short"]


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    seen: dict[str, Any] = {"gathered": ranks.gather(VALUES[rank]), "first": ranks.from_rank_0(VALUES[rank])}
    seen["nothing"] = ranks.from_rank_0(None)
    evil = torch.frombuffer(bytearray(pickle.dumps(Evil(folder / "ran"))), dtype=torch.uint8)
    if rank == 0:  # what a stranger in rank 0's place would send
        distributed.broadcast(torch.tensor([evil.numel()]), src=0)
        distributed.broadcast(evil, src=0)
        distributed.broadcast(torch.tensor([1 << 50]), src=0)
    else:
        for name in ("pickled", "huge"):
            try:
                ranks.from_rank_0(None)
            except ValueError as refused:  # UnicodeDecodeError and JSONDecodeError are such
                seen[name] = str(refused)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_values_arrive_as_they_were_and_a_pickle_is_refused(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    children = [forked.Process(target=work, args=(rank, tmp_path)) for rank in range(WORLD)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * WORLD
    for rank in range(WORLD):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["gathered"] == VALUES and seen["first"] == VALUES[0] and seen["nothing"] is None
        assert rank == 0 or ("at most" in seen["huge"] and seen["pickled"])
    assert not (tmp_path / "ran").exists()


def test_one_process_needs_no_group() -> None:
    assert ranks.gather("alone") == ["alone"] and ranks.from_rank_0("alone") == "alone"
