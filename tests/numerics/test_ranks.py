"""Messages between ranks on three real gloo processes: values arrive unchanged; a peer's bytes are never executed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed

from sft_play.errors import HardwareError
from sft_play.plan.plan import Plan
from sft_play.training.ranks import Ranks, check_peers
from tests.pickles import Evil

WORLD = 3
VALUES = [{"rank": 0, "text": "ä\n" * 500, "none": None}, [1.5, float("inf")], "short"]


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    ranks = Ranks(rank, WORLD)
    seen: dict[str, Any] = {"gathered": ranks.gather(VALUES[rank]), "first": ranks.broadcast(VALUES[rank])}
    seen["nothing"] = ranks.broadcast(None)
    seen["table"] = ranks.table([rank, 2**53 - 1])
    seen["total"] = ranks.total(torch.tensor([rank, 1])).tolist()
    seen["any"] = [ranks.any(rank == 1), ranks.any(False)]
    seen["problems"] = [ranks.first_problem(problem) for problem in (None, "full" if rank else None, f"full {rank}")]
    evil = torch.frombuffer(bytearray(pickle.dumps(Evil(folder / "ran"))), dtype=torch.uint8)
    if rank == 0:  # what a stranger in rank 0's place would send
        ranks.table([evil.numel()])
        distributed.all_gather([torch.empty_like(evil) for _ in range(WORLD)], evil)
        ranks.table([1 << 50])
    else:
        for name in ("pickled", "huge"):
            try:
                ranks.broadcast(None)
            except ValueError as refused:  # UnicodeDecodeError and JSONDecodeError are such
                seen[name] = str(refused)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def start_ranks(target: Any, *arguments: Any) -> None:
    forked = multiprocessing.get_context("fork")
    children = [forked.Process(target=target, args=(rank, *arguments)) for rank in range(WORLD)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * WORLD


@pytest.mark.slow
def test_values_arrive_unchanged_and_a_pickle_is_refused(tmp_path: Path) -> None:
    start_ranks(work, tmp_path)
    for rank in range(WORLD):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["gathered"] == VALUES and seen["first"] == VALUES[0] and seen["nothing"] is None
        assert seen["table"] == [[each, 2**53 - 1] for each in range(WORLD)] and seen["total"] == [3, 3]
        assert seen["any"] == [True, False] and seen["problems"] == [None, "rank 1: full", "full 0"]
        assert rank == 0 or ("at most" in seen["huge"] and seen["pickled"])
    assert not (tmp_path / "ran").exists()


def meet(rank: int, folder: Path, stranger: int) -> None:
    key = "of another run, secret" if rank == stranger else "of this run, secret"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_KEY": key}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    try:
        check_peers(cast(Plan, SimpleNamespace(num_nodes=2)), Ranks(rank, WORLD))
    except HardwareError as error:
        (folder / f"{rank}.txt").write_text(error.message)
    distributed.destroy_process_group()


@pytest.mark.parametrize("stranger", [None, 0, 2])
def test_a_rank_that_does_not_know_the_runs_key_is_found(stranger: int | None, tmp_path: Path) -> None:
    start_ranks(meet, tmp_path, stranger)
    for rank in set(range(WORLD)) - {stranger}:
        report = tmp_path / f"{rank}.txt"
        assert report.exists() == (stranger is not None)
        assert stranger is None or report.read_text().startswith(f"rank {stranger} does not know")
