"""Runs a module of this folder as several ranks over gloo."""

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

from tests.conftest import ROOT


def answer(work: Callable[[int, int, list[str]], dict[str, Any]]) -> None:
    """Writes what `work(rank, world, words)` returns, in a process that `found` started."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    Path(sys.argv[4]).write_text(json.dumps(work(rank, world, sys.argv[5:])))
    distributed.barrier()
    distributed.destroy_process_group()


def found(module: str, folder: Path, world: int, words: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON object that rank 0 of `python -m tests.numerics.MODULE RANK WORLD MEETING_FILE OUT_FILE WORDS...` writes."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    each = [sys.executable, "-m", f"tests.numerics.{module}"]
    started = [
        subprocess.Popen(
            [*each, str(rank), str(world), *map(str, (folder / "meeting", folder / f"{rank}.json")), *words],
            cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(text[-2000:] for text in said)
    ranks: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return ranks
