"""Runs a module of tests as several ranks over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from sft_play.launch.environment import free_port
from tests.conftest import ROOT


def answer(work: Callable[[int, int, list[str]], dict[str, Any]]) -> None:
    """Write what `work(rank, world, words)` returns, in a process that `results_of_ranks` started."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(work(rank, distributed.get_world_size(), sys.argv[2:])))
    distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(world: int, module: str, *words: str, inside: Sequence[str] = ()) -> None:
    """Run `python -m MODULE WORDS...` as the ranks of a torchrun, without a GPU; fail with their output. `inside` is a
    prefix of the command.
    """
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--master-port",
        str(free_port()),
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*inside, *launch, "-m", module, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def results_of_ranks(
    module: str, folder: Path, world: int, words: Sequence[str], inside: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the JSON object that each rank of `tests.numerics.MODULE FOLDER WORDS...` writes."""
    run_ranks(world, f"tests.numerics.{module}", str(folder), *words, inside=inside)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
