"""Out of memory for real: allocations that fail (rlimit) and a kill by the kernel (cgroup); the run goes on to the same losses."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft_play.launch.liveness import counters_of
from tests.conftest import ROOT, environment, metrics, run_program
from tests.fault_runs import workers_of
from tests.memory_runs import heavy_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are the kernel's")]
SECONDS = 240
MIB = 2**20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heavy_config(tmp_path_factory.mktemp("heavy"))


@pytest.fixture(scope="module")
def variables(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(cache, tmp_path_factory.mktemp("runs"), {"OMP_NUM_THREADS": "1"})


def start(words: list[str], variables: dict[str, str], limit: int | None = None) -> subprocess.Popen[str]:
    """Starts the program, with at most `limit` bytes of address space for it and for each of its children."""

    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", *words], cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    if limit:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    return process


def status(pid: int, name: str) -> int:
    """Returns bytes of a field of `/proc/PID/status`, as VmPeak."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def after_first_step(process: subprocess.Popen[str], run: Path, act: Callable[[dict[int, psutil.Process]], None]) -> None:
    """Calls `act` with the workers once the first, light step is done: what comes next is the heavy one."""
    deadline = time.monotonic() + SECONDS
    while not ((run / "metrics.jsonl").is_file() and metrics(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    act(workers_of(process.pid))


@pytest.fixture(scope="module")
def undisturbed(config: Path, variables: dict[str, str]) -> tuple[Path, int]:
    """A run with half the micro-batch from the start, and the most address space that its worker took."""
    process = start(["train", f"CONFIG={config}", "RUN_NAME=undisturbed", "TRAIN_BATCH_SIZE=4"], variables)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            peak = max([peak, *(status(one.pid, "VmPeak") for one in workers_of(process.pid).values())])
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return Path(variables["RUNS_DIR"]) / "undisturbed", peak


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def require_same(run: Path, reference: Path, copies: int = 1) -> None:
    """Each step stands there once, with the losses, norms and learning rates of the undisturbed run; `copies`: ranks that train the same rows."""
    rows, expected = metrics(run), metrics(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-5), name
        assert sum(row["rank_tokens"]) == copies * sum(wanted["rank_tokens"])


def test_a_failed_allocation_halves_the_micro_batch(
    config: Path, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    reference, peak = undisturbed
    words = ["train", f"CONFIG={config}", "RUN_NAME=short", "TRAIN_BATCH_SIZE=8"]
    process = start(words, variables, limit=peak + 300 * MIB)  # eight rows take 700 MiB more
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("recovering: ")]
    assert "rank 0: memory ran out in step 2, micro-batch 1 (rows " in line
    assert "micro-batch 8 x accumulation 1 -> 4 x 2 on every rank (although `train.batch_size` was given)" in line
    assert "global batch 8 as before; continuing from step-000001 (retry 1 of 3)" in line
    run = reference.parent / "short"
    require_same(run, reference)
    assert [event["event"] for event in events(run)] == ["started", "recovered", "finished"]
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"][0]["micro_batch"], plan["ranks"][0]["accumulation"], plan["global_batch_size"]) == (4, 2, 8)
    (kept,) = json.loads((run / "stamp.json").read_text())["recoveries"]
    assert (kept["cause"], kept["rank"], kept["checkpoint"], kept["doing"]["step"]) == ("out_of_memory", 0, "step-000001", 2)
    assert (kept["before"]["micro_batches"], kept["after"]["micro_batches"], kept["after"]["accumulation"]) == ([8], [4], 2)
    assert json.loads((run / "training_metrics.json").read_text())["recoveries"] == [kept]
    assert json.loads((run / "model" / "stamp.json").read_text())["recoveries"] == [kept]

    longer = run_program(["resume", "RUN=short", "TRAIN_MAX_STEPS=4"], variables)
    assert longer.code == 0, longer.err
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"][0]["micro_batch"], plan["ranks"][0]["accumulation"]) == (4, 2)
    assert [dict(item) for item in plan["recoveries"]] == [kept]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


def test_one_rank_of_two_at_a_micro_batch_of_one_turns_to_checkpointing(
    config: Path, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    run = undisturbed[0].parent / "pair"
    words = [
        "train-distributed",
        f"CONFIG={config}",
        "RUN_NAME=pair",
        "NUM_GPUS=2",
        "TRAIN_BATCH_SIZE=1",
        "TRAIN_SAVE_STRATEGY=no",
    ]
    process = start(words, variables)

    def limit_rank_1(found: dict[int, psutil.Process]) -> None:
        room = status(found[1].pid, "VmSize") + 60 * MIB  # a long row takes 190
        resource.prlimit(found[1].pid, resource.RLIMIT_AS, (room, room))

    after_first_step(process, run, limit_rank_1)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("recovering: ")]
    assert "rank 1: memory ran out in step 2" in line
    assert "gradient checkpointing off -> on" in line
    assert "continuing from step 0: there is no checkpoint yet" in line
    require_same(run, undisturbed[0])
    plan = json.loads((run / "plan.json").read_text())
    assert plan["gradient_checkpointing"] is True
    assert [rank["micro_batch"] for rank in plan["ranks"]] == [1, 1]


def test_without_a_remedy_the_ways_out_are_named(config: Path, variables: dict[str, str], tmp_path: Path) -> None:
    words = ["train", f"CONFIG={config}", "RUN_NAME=end", "TRAIN_BATCH_SIZE=1", "TRAIN_GRADIENT_CHECKPOINTING=false", "JSON=1"]
    process = start(words, variables | {"RUNS_DIR": str(tmp_path)})

    def limit(found: dict[int, psutil.Process]) -> None:
        room = status(found[0].pid, "VmSize") + 60 * MIB
        resource.prlimit(found[0].pid, resource.RLIMIT_AS, (room, room))

    after_first_step(process, tmp_path / "end", limit)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, out + err
    assert "the micro-batch is 1 already and gradient checkpointing is off as configured" in err
    (ways,) = [line for line in err.splitlines() if line.startswith("hint: choose one: ")]
    assert "TRAIN_GRADIENT_CHECKPOINTING=true: " in ways
    assert "MODEL_MAX_SEQ_LEN=" in ways
    assert "make resume RUN=end" in err
    assert "Traceback" not in err
    last = json.loads((tmp_path / "end" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["cause"]) == ("failed", "out_of_memory"), (
        "a container's entry point goes by it (schedulers.entry)"
    )
    assert "Traceback" in (tmp_path / "end" / "logs" / "rank0.log").read_text()
    record = json.loads((tmp_path / "end" / "logs" / "exit-rank0.json").read_text())
    assert (record["code"], record["cause"], record["doing"]["phase"], record["doing"]["step"]) == (
        75,
        "out_of_memory",
        "training",
        2,
    )
    assert len(record["doing"]["rows"]) == 1
    assert [event["event"] for event in events(tmp_path / "end")] == ["started", "failed"]


@pytest.mark.parametrize(
    ("command", "way", "room"),  # MiB; four long rows take 750, two 380, by stages or slices half of that
    [
        pytest.param("train-deepspeed", "", 550, marks=pytest.mark.long),
        pytest.param("train-fsdp", "", 550, marks=pytest.mark.long),
        ("train-distributed", "LAUNCH_STRATEGY=pipeline", 280),
        pytest.param("train-distributed", "LAUNCH_TENSOR_PARALLEL=2", 280, marks=pytest.mark.long),
    ],
)
def test_shards_and_parts_go_on_from_their_checkpoint(
    command: str, way: str, room: int, config: Path, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    run = undisturbed[0].parent / f"{command}{way}".replace("_", "-")
    words = [command, f"CONFIG={config}", f"RUN_NAME={run.name}", "NUM_GPUS=2", "TRAIN_BATCH_SIZE=4", *way.split()]
    process = start(words, variables)

    def limit_rank_1(found: dict[int, psutil.Process]) -> None:
        size = status(found[1].pid, "VmSize") + room * MIB
        resource.prlimit(found[1].pid, resource.RLIMIT_AS, (size, size))

    after_first_step(process, run, limit_rank_1)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("recovering: ")]
    assert f"micro-batch 4 x accumulation {2 if way else 1} -> 2 x {4 if way else 2} on every rank" in line
    assert "continuing from step-000001" in line
    require_same(run, undisturbed[0], copies=2 if way else 1)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of our own beside this process's, v2 or v1."""
    counters = counters_of(os.getpid())
    if not counters:
        pytest.skip("this process is in no memory cgroup")
    folder = counters[0].parent / f"sft-play-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not limit_file(folder).is_file():
            pytest.skip("the memory controller is not handed down to new cgroups")
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(psutil.Error):
                psutil.Process(int(pid)).kill()
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def limit_file(folder: Path) -> Path:
    second = folder / "memory.max"
    return second if second.is_file() else folder / "memory.limit_in_bytes"


def held_by(folder: Path) -> int:
    """Returns the bytes of a cgroup's processes, without the page cache."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields["anon"] if "anon" in fields else fields["total_rss"])


def test_a_rank_that_the_kernel_kills_halves_the_micro_batch(
    config: Path, variables: dict[str, str], undisturbed: tuple[Path, int], cgroup: Path
) -> None:
    run = undisturbed[0].parent / "killed"
    process = start(["train-distributed", f"CONFIG={config}", "RUN_NAME=killed", "NUM_GPUS=2", "TRAIN_BATCH_SIZE=4"], variables)
    (cgroup / "cgroup.procs").write_text(str(process.pid))
    # Two ranks with four long rows each take 1,500 MiB in step 2, with two each 750.

    def limit(_: object) -> None:
        limit_file(cgroup).write_text(str(held_by(cgroup) + 1150 * MIB))

    after_first_step(process, run, limit)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("recovering: ")]
    assert "was killed by SIGKILL because memory ran out (`" in line
    assert f"{cgroup}" in line
    assert "micro-batch 4 x accumulation 1 -> 2 x 2 on every rank (although `train.batch_size` was given)" in line
    assert "global batch 8 as before; continuing from step-000001" in line
    require_same(run, undisturbed[0])
    (kept,) = json.loads((run / "training_metrics.json").read_text())["recoveries"]
    assert kept["rank"] in (0, 1)
    assert kept["doing"] == {}
