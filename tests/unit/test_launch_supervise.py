"""Supervision with real processes: which rank failed first, which code is returned, what is watched, and that nothing
remains.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from sft_play.launch.liveness import Beat, MemoryKills, counters_of, read_counter
from sft_play.launch.recovery import Restarts
from sft_play.launch.verdict import Outcome, culprits, hang, outcome_of, standing
from sft_play.runs.folder import RunFolder
from sft_play.training.faults import verdict
from sft_play.training.metrics import Sampler
from sft_play.training.process import Activity, leave_record
from tests.conftest import ROOT
from tests.waiting import until


def run_with(tmp_path: Path, records: dict[int, dict[str, Any]]) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.logs.mkdir(parents=True)
    for rank, record in records.items():
        run.rank_exit(rank).write_text(json.dumps(record))
    return run


def summary(codes: dict[int, int]) -> str:
    """Return torchrun's summary as in launcher.log."""
    return "".join(
        f"[{i}]:\n  time      : 2026\n  host      : x\n  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid:"
        " 7)\n"
        for i, (rank, code) in enumerate(codes.items())
    )


def record(code: int, moment: float, error: str = "") -> dict[str, Any]:
    return {"code": code, "time": moment, "error": error}


def test_the_earliest_permanent_error_is_named_and_no_rank_that_torchrun_ended(tmp_path: Path) -> None:
    run = run_with(
        tmp_path, {0: record(75, 1.0, "peer gone"), 1: record(4, 3, "error: bad row"), 2: record(1, 4, "Traceback")}
    )
    outcome = outcome_of(run, range(4), agent_code=1, agent_log=summary({1: 4, 3: -15}))
    assert (outcome.code, outcome.rank) == (4, 1)
    assert outcome.message.startswith(f"error: bad row\n\nrank 1 ({socket.gethostname()}) failed first")
    assert "rank1.log" in outcome.message


def test_failed_starts_of_workers_show_the_agents_last_lines(tmp_path: Path) -> None:
    outcome = outcome_of(
        run_with(tmp_path, {}), range(1), agent_code=1, agent_log="ModuleNotFoundError: No module named 'accelerate'"
    )
    assert outcome.code == 1 and "No module named 'accelerate'" in outcome.message


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:26508: Connection reset by peer.",
        (
            "DistBackendError: NCCL error in: NCCLUtils.cpp:94, socketProgress: Connection closed by remote peer"
            " node2<59116>"
        ),
        "RuntimeError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST)",
    ],
)
def test_a_peer_on_another_node_that_has_gone_is_worth_another_try(tmp_path: Path, message: str) -> None:
    kind, _, text = message.partition(": ")
    problem = RuntimeError(text) if kind == "RuntimeError" else getattr(distributed, kind)(text)
    what = verdict(problem, RunFolder(tmp_path), Activity())
    assert what["code"] == 75
    run, error = run_with(tmp_path, {2: what | {"time": 1.0}}), what["error"]
    outcome = outcome_of(run, range(2, 3), agent_code=1, agent_log=summary({2: 1}))
    assert (outcome.code, outcome.rank, outcome.cause) == (75, 2, "peer")
    lost = (
        f"rank 2 ({socket.gethostname()}) lost its connection to another rank; the machine of that rank says why; the"
        " log of rank 2: "
    )
    assert outcome.message.startswith(f"{error}\n\n{lost}{run.rank_log(2)}; docs/"), (
        "the rank that failed is not this one"
    )


def test_a_run_whose_folder_is_gone_reports_it_and_leaves_no_stub(tmp_path: Path) -> None:
    run = run_with(tmp_path, {})
    run.path.rename(tmp_path / "elsewhere")
    leave_record(run, 0, record(3, 1.0, "error: the run's folder is gone"))
    assert not run.path.exists(), "no stub that looks like a run"
    outcome = outcome_of(run, range(1), agent_code=1, agent_log=summary({0: 3}))
    assert (
        outcome.code == 3
        and f"{run.path}: the run's folder is gone" in outcome.message
        and "was it moved" in outcome.message
    )
    assert "make room" not in outcome.message and "hint: if it was moved, move it back" in outcome.message


# What is watched next to a run, and its end.


BEGIN = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sft_play.training.faults import end
folder = Path(sys.argv[1])
def work(name, seconds):
    time.sleep(seconds)
    (folder / name).touch()
atexit.register(lambda: (folder / "exit-functions").touch())
pool = ThreadPoolExecutor(1)
pool.submit(int)
(folder / "ready").touch()
"""


@pytest.mark.parametrize(
    ("thread", "expected"),
    [
        ("threading.Thread(target=work, args=('sent', 0.5)).start()", {"sent", "exit-functions"}),
        ("pool.submit(work, 'sent', 0.5)", {"sent", "exit-functions"}),
        ("threading.Thread(target=work, args=('late', 600)).start()", {"exit-functions"}),
    ],
)
def test_threads_get_some_seconds_and_exit_functions_their_turn(
    tmp_path: Path, thread: str, expected: set[str]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BEGIN}{thread}\nend(0)", str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: (tmp_path / "ready").exists() or child.poll() is not None, seconds=240)
        assert child.wait(timeout=240) == 0
    finally:
        child.kill()
        child.wait(timeout=240)
    assert {path.name for path in tmp_path.iterdir()} - {"ready"} == expected


def test_cards_are_sampled_and_failing_queries_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Nvml(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    card, reasons = SimpleNamespace(number=1, handle=0, card=0), iter([0x4, 0x40])
    nvml = Nvml(
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: next(reasons),
    )
    sampler = Sampler(1)
    for _ in range(2):
        sampler.look(nvml, card)
    assert sampler.take() == {"utilisation": 50.0, "power_watts": 250.0, "throttled": 50.0}, "a power cap is no fault"
    assert sampler.take() == {}
    assert capsys.readouterr().err.count("is not sampled any more") == 2


# When a launch continues by itself, how long it waits, and which rank is blamed for standing still.


LOST = Outcome(
    code=75,
    rank=1,
    message="error: rank 1 (node1) was killed by SIGKILL; all other ranks were stopped\n\nhint: x",
    cause="killed",
)


def test_restarts_without_a_newer_checkpoint_are_limited() -> None:
    state = Restarts(limit=2, step=0)
    first, second = Path("step-000004"), Path("step-000008")
    pauses = [state.following(LOST, newest).pause for newest in (None, None, None, first, first, first, second)]
    assert pauses == [2, 4, 0, 2, 4, 0, 2], "progress gives new restarts, and 0 is the end"
    assert max(Restarts(limit=99, step=0, used=used).following(LOST, None).pause for used in range(40)) == 60


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
    """Return the blamed ranks and the message."""
    standings = {beat.rank: standing(beat, 99.0, stacks[beat.rank] if stacks else "") for beat in beats}
    loss = hang(standings, RunFolder(Path("runs/demo")))
    return culprits(standings), "\n".join([loss.text, *loss.lines])


def test_the_rank_that_is_behind_is_blamed() -> None:
    assert blamed(beat(0, "training", 4), beat(1, "updating", 3), beat(2, "training", 4))[0] == [1]
    assert blamed(beat(0, "training", 4, 2), beat(1, "training", 4, 1))[0] == [1]


def test_of_ranks_at_the_same_place_the_working_one_is_blamed() -> None:
    at = beat(0, "saving", 4), beat(1, "saving", 4)
    assert blamed(*at, stacks=(WAITS, WAITS))[0] == []
    named, reason = blamed(*at, stacks=(WORKS, WAITS))
    assert named == [0] and reason.startswith("rank 0 (here) made no step for 99 s\n")
    assert "rank 0 (here): saving after step 4, at read (datasets/table.py)" in reason
    assert (
        "rank 1 (here): saving after step 4 waiting for other ranks, at all_reduce (distributed/distributed_c10d.py)"
        in reason
    )


def test_if_ranks_wait_for_the_gpu_the_one_with_fewer_collective_operations_is_blamed() -> None:
    """Under NCCL no rank's stack shows torch.distributed: operations run on the GPU, and every rank waits for its
    result.
    """

    def begun(*counts: int | None) -> tuple[list[int], str]:
        beats = [replace(beat(rank, "updating", 4), collectives=count) for rank, count in enumerate(counts)]
        return blamed(*beats, stacks=(WAITS_FOR_GPU,) * 3)

    named, reason = begun(41, 40, 41)
    assert named == [1]
    assert "waiting for the rows of the next, 40 collective operations begun, at item (torch/_tensor.py)" in reason
    assert begun(41, 41, 41)[0] == []
    assert begun(41, None, 41)[0] == [], "one that did not tell is not compared"


def test_a_kill_for_memory_is_counted_in_the_cgroup_of_the_rank_or_a_parent(tmp_path: Path) -> None:
    """A container sees the tree below its own group: the path that the kernel names begins above it."""
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("1:name=systemd:/x\n0::/pods/pod1/rank\n")
    (top / "pod1" / "rank").mkdir(parents=True)
    events = [folder / "memory.events" for folder in (top / "pod1" / "rank", top / "pod1")]
    for path in events:
        path.write_text("low 0\noom 1\noom_kill 2\n")
    assert counters_of(7, proc, top) == events
    assert counters_of(8, proc, top) == [], "it has gone"
    kills = MemoryKills()
    kills.before = {path: read_counter(path) or 0 for path in events}
    assert kills.evidence() is None
    events[1].write_text("oom_kill 3\n")
    assert kills.evidence() == f"`{events[1]}` counts 1 kill for memory"
