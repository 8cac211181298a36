"""When a launch goes on by itself, how long it waits, and which rank is blamed for standing still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sft_play.launch.liveness import Beat
from sft_play.launch.recovery import Restarts
from sft_play.launch.verdict import Outcome, culprits, hang, standing
from sft_play.runs.folder import RunFolder

LOST = Outcome(
    code=75,
    rank=1,
    message="error: rank 1 (node1) was killed by SIGKILL; all other ranks were stopped\n\nhint: x",
    cause="killed",
)


def test_so_many_in_a_row_without_a_newer_checkpoint() -> None:
    state = Restarts(limit=2, step=0)
    first, second = Path("step-000004"), Path("step-000008")
    assert state.allows(None) and state.pause() == 2
    assert state.allows(None) and state.pause() == 4
    assert not state.allows(None)
    assert state.allows(first), "there is progress"
    assert state.allows(first)
    assert not state.allows(first)
    assert state.allows(second)
    assert max(Restarts(limit=99, step=0, used=used).pause() for used in range(1, 40)) == 60


def beat(rank: int, phase: str, step: int, micro_step: int | None = None) -> Beat:
    return Beat(rank=rank, host="here", pid=1, phase=phase, step=step, micro_step=micro_step, quiet=99, limit=1)


WAITS = """Thread 0x01 (most recent call first):
  File "/x/sft_play/training/heartbeat.py", line 1 in _beat
  File "/lib/threading.py", line 1 in run

Current thread 0x02 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 1 in all_reduce
  File "/x/sft_play/training/loss.py", line 48 in all_sum
  File "/x/sft_play/train.py", line 100 in train_rank
"""
WAITS_FOR_GPU = WAITS.replace("torch/distributed/distributed_c10d.py", "torch/_tensor.py").replace("all_reduce", "item")
WORKS = WAITS.replace("torch/distributed/distributed_c10d.py", "datasets/table.py").replace("all_reduce", "read")


def blamed(*beats: Beat, stacks: tuple[str, ...] = ()) -> tuple[list[int], str]:
    """Returns the ranks that are blamed, and what is said."""
    found = {beat.rank: standing(beat, 99.0, stacks[beat.rank] if stacks else "") for beat in beats}
    return culprits(found), hang(found, RunFolder(Path("runs/demo"))).text


def test_the_rank_that_is_behind_is_blamed() -> None:
    assert blamed(beat(0, "training", 4), beat(1, "updating", 3), beat(2, "training", 4))[0] == [1]
    assert blamed(beat(0, "training", 4, 2), beat(1, "training", 4, 1))[0] == [1]


def test_at_one_place_the_rank_that_waits_for_nobody_is_blamed() -> None:
    at = beat(0, "saving", 4), beat(1, "saving", 4)
    assert blamed(*at, stacks=(WAITS, WAITS))[0] == []
    named, said = blamed(*at, stacks=(WORKS, WAITS))
    assert named == [0] and said.startswith("rank 0 (here) made no step for 99 s; all ranks were stopped")
    assert "rank 0 (here): saving after step 4, at read (datasets/table.py)" in said
    assert "rank 1 (here): saving after step 4 waiting for other ranks, at all_reduce (distributed/distributed_c10d.py)" in said


def test_where_ranks_wait_for_the_gpu_the_one_with_fewer_collective_operations_is_blamed() -> None:
    """Under NCCL no rank stands in torch.distributed: the operations run on the GPU, and every rank waits for a number from it."""

    def begun(*counts: int | None) -> tuple[list[int], str]:
        beats = [replace(beat(rank, "updating", 4), collectives=count) for rank, count in enumerate(counts)]
        return blamed(*beats, stacks=(WAITS_FOR_GPU,) * 3)

    named, said = begun(41, 40, 41)
    assert named == [1]
    assert "waiting for the rows of the next, 40 collective operations begun, at item (torch/_tensor.py)" in said
    assert begun(41, 41, 41)[0] == []
    assert begun(41, None, 41)[0] == [], "one that did not tell is not compared"
