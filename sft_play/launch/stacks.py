"""The stacks of ranks that make no step: asking for them, and telling from them which rank keeps the others waiting."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping, Sequence

import psutil

from sft_play.launch.beats import Beat
from sft_play.runs.folder import RunFolder

STACKS_SIGNAL = signal.SIGUSR2
"""Answered by faulthandler in C, so that a rank whose Python stands still answers too."""
WAIT_SECONDS = 3.0
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in (?P<function>\S+)', re.MULTILINE)
MAIN = re.compile(r"sft_play/(train|probe)\.py$")
COLLECTIVE = re.compile(r"/torch/distributed/|/accelerate/utils/operations\.py$|/deepspeed/comm/")


def keep_stacks(run: RunFolder, workers: Mapping[int, psutil.Process]) -> dict[int, str]:
    """Asks every worker for the stacks of all its threads; returns rank -> what it wrote to `logs/stack-rank{N}.txt` now."""
    before = {rank: _size(run, rank) for rank in workers}
    for worker in workers.values():
        with contextlib.suppress(psutil.Error):
            worker.send_signal(STACKS_SIGNAL)
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until and any(_size(run, rank) == size for rank, size in before.items()):
        time.sleep(0.1)
    time.sleep(0.2)  # the last one may still be writing
    return {rank: _from(run, rank, size) for rank, size in before.items()}


def remove_empty(run: RunFolder, ranks: range) -> None:
    """Removes the files of ranks that were never asked."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            if _size(run, rank) == 0:
                run.rank_stack(rank).unlink()


def _size(run: RunFolder, rank: int) -> int:
    try:
        return run.rank_stack(rank).stat().st_size
    except OSError:
        return 0


def _from(run: RunFolder, rank: int, start: int) -> str:
    try:
        return run.rank_stack(rank).read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""


def main_frames(stacks: str) -> list[tuple[str, str]]:
    """Returns (file, function) of the training thread, innermost first; empty where it is not found."""
    for thread in re.split(r"\n(?=Thread |Current thread )", stacks):
        frames = [(found["file"], found["function"]) for found in FRAME.finditer(thread)]
        if any(MAIN.search(file) for file, _ in frames):
            return frames
    return []


def in_collective(stacks: str) -> bool:
    """Whether the training thread waits for other ranks."""
    return any(COLLECTIVE.search(file) for file, _ in main_frames(stacks))


def culprits(beats: Mapping[int, Beat], stacks: Mapping[int, str]) -> list[int]:
    """Returns the ranks that keep the others waiting: those that are behind, else those that have begun fewer collective operations (under
    NCCL ranks wait for the GPU, in no frame of torch.distributed), else those that wait for nobody; empty if unknown."""
    if len(beats) < 2:
        return list(beats)
    for place in (
        {rank: beat.at() for rank, beat in beats.items()},
        {rank: (beat.collectives,) for rank, beat in beats.items() if beat.collectives is not None},
    ):
        if len(place) == len(beats) and len(set(place.values())) > 1:
            return [rank for rank, at in place.items() if at == min(place.values())]
    working = [rank for rank in beats if main_frames(stacks.get(rank, "")) and not in_collective(stacks[rank])]
    return working if len(working) < len(beats) else []


def describe(beats: Mapping[int, Beat], stacks: Mapping[int, str], blamed: Sequence[int]) -> str:
    """Returns a line for each rank: where it stands, and the innermost frame of its training thread."""
    lines = []
    for rank, beat in sorted(beats.items()):
        frames = main_frames(stacks.get(rank, ""))
        inner = f", at {frames[0][1]} ({'/'.join(frames[0][0].split('/')[-2:])})" if frames else ""
        begun = f", {beat.collectives} collective operations begun" if beat.collectives is not None else ""
        waits = " waiting for other ranks" if rank not in blamed and frames and in_collective(stacks[rank]) else ""
        lines.append(f"  rank {rank} ({beat.host}): {beat.where()}{waits}{begun}{inner}")
    return "\n".join(lines)
