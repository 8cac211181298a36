"""Ranks that NCCL's watchdog ends after a peer's loss: a program that prints and dies like them, under the real
torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.verdict import Loss, outcome_of
from tests.documents import on_page
from tests.unit.test_launch_supervise import record, run_with, summary

PREFIX = (
    "[rank{rank}]:[E1122 14:00:00.{rank}00000 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
)
REMOTE = """Process group watchdog thread terminated with exception: NCCL error: \
remote process exited or there was a network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer node2<59116>
Exception raised from checkForNCCLErrorsInternal at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2363 \
(most recent call first):
terminate called after throwing an instance of 'c10::DistBackendError'
"""
TIMEOUT = """Process group watchdog thread terminated with exception: \
[Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) \
ran for 1800011 milliseconds before timing out.
"""
FAULT = """Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
"""
STACKS = "Fatal Python error: Aborted\n" + '  File "x.py", line 1 in f\n' * 2000
"""What Python's fault handler writes after the reason."""

SUPERVISOR = """
import os, sys
from pathlib import Path
from sft_play.launch.node import supervise
from sft_play.runs.folder import RunFolder
agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0", *sys.argv[2:]]
outcome = supervise(agent, os.environ, RunFolder(Path(sys.argv[1])), range(4), console=2)
print(outcome.message)
sys.exit(outcome.code)
"""
WORKER = """
import json, os, pathlib, signal, sys, time
folder, death, words = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a thread that sits in NCCL does not hear it
log = (folder / "logs" / f"rank{rank}.log").open("w")
(folder / f"here-{rank}").touch()
while len(list(folder.glob("here-*"))) < 4:
    time.sleep(0.02)
if rank == 1:
    (folder / "first").touch()
    if death == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    record = {"code": 4, "error": "error: row 7 is damaged", "time": time.time()}
    (folder / "logs" / "exit-rank1.json").write_text(json.dumps(record))
    os._exit(4)
while not (folder / "first").exists():
    time.sleep(0.02)
time.sleep(0.3 + 0.2 * rank)
log.write(words)
log.close()
os.abort()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "code", "message"),
    [
        ("killed", 75, "was killed by SIGKILL"),
        pytest.param("record", 4, "error: row 7 is damaged", marks=pytest.mark.long),
    ],
)
def test_of_four_ranks_the_first_lost_is_named_and_not_those_that_abort(
    death: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "run").mkdir()
    words = [
        str(tmp_path / "worker.py"),
        str(tmp_path / "run"),
        death,
        PREFIX.format(rank=0) + REMOTE,
        "-m",
        "sft_play.train",
    ]
    process = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "run"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == code, process.stdout + process.stderr
    assert message in process.stdout
    assert "rank 1 (" in process.stdout and "rank 0" not in process.stdout
    root_cause = (tmp_path / "run" / "logs" / "launcher.log").read_text().partition("Root Cause")[2]
    assert "exitcode  : -9" in root_cause or "exitcode  : 4" in root_cause, "torchrun itself has seen it"


def logged(tmp_path: Path, records: dict[int, dict[str, Any]], words: dict[int, str]) -> Any:
    run = run_with(tmp_path, records)
    for rank, text in words.items():
        run.rank_log(rank).write_text(PREFIX.format(rank=rank) + text + STACKS)
    return run


@pytest.mark.parametrize("text", [REMOTE, TIMEOUT])
def test_a_lone_surviving_rank_has_lost_its_peer(text: str, tmp_path: Path) -> None:
    """The machine of the rank that was lost is another one, and torchrun has asked this machine's other rank to
    leave.
    """
    run = logged(tmp_path, {3: record(143, 2.0)}, {2: text})
    for loss in (None, Loss(cause="killed", rank=2)):
        outcome = outcome_of(run, range(2, 4), agent_code=1, agent_log=summary({3: 143, 2: -6}), loss=loss)
        assert (outcome.code, outcome.rank, outcome.cause) == (75, 2, "peer")
        assert on_page("nccl-timeout", outcome.message), outcome.message


def test_a_rank_whose_own_gpu_failed_is_the_cause(tmp_path: Path) -> None:
    run = logged(tmp_path, {}, {0: REMOTE, 1: FAULT})
    outcome = outcome_of(run, range(2), agent_code=1, agent_log=summary({0: -6, 1: -6}))
    assert (outcome.code, outcome.rank, outcome.cause) == (75, 1, "killed")


@pytest.mark.parametrize(
    "words",
    [
        "Error out of memory at line 90 in file /src/csrc/ops.cu\n",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n" + STACKS,
    ],
)
def test_a_process_that_cpp_ended_out_of_memory_is_recognised(words: str, tmp_path: Path) -> None:
    """bitsandbytes leaves with code 1 and without an exception."""
    run = run_with(tmp_path, {})
    run.rank_log(0).write_text(words)
    code = 1 if words.startswith("Error") else -int(signal.SIGABRT)
    outcome = outcome_of(run, range(1), agent_code=1, agent_log=json.dumps("died") + summary({0: code}))
    assert (outcome.code, outcome.rank, outcome.cause) == (75, 0, "out_of_memory")
    assert words.splitlines()[0] in outcome.message
