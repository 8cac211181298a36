"""Out of memory for real: allocations that fail (rlimit) and a kill by the kernel (cgroup); the run continues to the
same losses.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import metrics, run_program
from tests.launcher import Started, start
from tests.memory_runs import heavy_config
from tests.quota import limit_memory, memory_limit, move

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are the kernel's")]
MIB = 2**20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"CONFIG={heavy_config(tmp_path_factory.mktemp('heavy'))}"


def limit_address_space(process: psutil.Process, mebibytes: int) -> None:
    """Let a process allocate at most this many bytes more."""
    size = status(process.pid, "VmSize") + mebibytes * MIB
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size, size))


def end(launch: Started) -> str:
    """Wait for a launch that succeeds; return its line about the recovery."""
    code, output = launch.end()
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("recovering: ")]
    return line


def status(pid: int, name: str) -> int:
    """Return the bytes of a field of `/proc/PID/status`, such as VmPeak."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


@pytest.fixture(scope="module")
def undisturbed(config: str, variables: dict[str, str]) -> tuple[Path, int]:
    """Return a run with half the micro-batch from the start, and its worker's peak address space."""
    peak = 0
    with start(variables, "train", config, "TRAIN_BATCH_SIZE=4", name="undisturbed") as launch:
        while launch.process.poll() is None:
            with contextlib.suppress(psutil.Error, OSError, IndexError):
                peak = max([peak, *(status(worker.pid, "VmPeak") for worker in launch.workers().values())])
            time.sleep(0.1)
        code, output = launch.end()
        assert code == 0, output
    return launch.run, peak


def require_same(run: Path, reference: Path, copies: int = 1) -> None:
    """Assert that each step is logged once, with the undisturbed run's losses, norms and rates; `copies`: ranks with
    the same rows.
    """
    rows, expected = metrics(run), metrics(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, expected_row in zip(rows, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert row[name] == pytest.approx(expected_row[name], rel=1e-5), name
        assert sum(row["rank_tokens"]) == copies * sum(expected_row["rank_tokens"])


def test_a_failed_allocation_halves_the_micro_batch(
    config: str, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    reference, peak = undisturbed
    with start(variables, "train", config, "TRAIN_BATCH_SIZE=8", name="short") as launch:
        limit = peak + 300 * MIB  # eight rows take 700 MiB more
        resource.prlimit(launch.process.pid, resource.RLIMIT_AS, (limit, limit))  # of its children too
        line = end(launch)
    assert "rank 0: memory ran out in step 2, micro-batch 1 (rows " in line
    assert "micro-batch x accumulation 8 x 1 -> 4 x 2 on every rank" in line
    assert "global batch 8 as before; continuing from step-000001 (retry 1 of 3)" in line
    run = launch.run
    require_same(run, reference)
    assert [event["event"] for event in launch.events()] == ["started", "recovered", "finished"]
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"][0]["micro_batch"], plan["ranks"][0]["accumulation"], plan["global_batch_size"]) == (4, 2, 8)
    (recovery,) = json.loads((run / "stamp.json").read_text())["recoveries"]
    assert (recovery["cause"], recovery["rank"], recovery["checkpoint"], recovery["doing"]["step"]) == (
        "out_of_memory",
        0,
        "step-000001",
        2,
    )
    assert (
        recovery["before"]["micro_batches"],
        recovery["after"]["micro_batches"],
        recovery["after"]["accumulation"],
    ) == (
        [8],
        [4],
        2,
    )
    assert json.loads((run / "training_metrics.json").read_text())["recoveries"] == [recovery]
    assert json.loads((run / "model" / "stamp.json").read_text())["recoveries"] == [recovery]

    longer = run_program(["resume", "RUN=short", "TRAIN_MAX_STEPS=4"], variables)
    assert longer.code == 0, longer.err
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"][0]["micro_batch"], plan["ranks"][0]["accumulation"]) == (4, 2)
    assert [dict(item) for item in plan["recoveries"]] == [recovery]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.broad
def test_one_rank_of_two_at_a_micro_batch_of_one_turns_to_checkpointing(
    config: str, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    words = ("NUM_GPUS=2", "TRAIN_BATCH_SIZE=1", "TRAIN_SAVE_STRATEGY=no")
    with start(variables, "train-distributed", config, *words, name="pair") as launch:
        launch.wait_for_step(1)
        limit_address_space(launch.workers()[1], 60)  # a long row takes 190
        line = end(launch)
    assert "rank 1: memory ran out in step 2" in line
    assert "gradient checkpointing off -> on" in line
    assert "continuing from step 0: there is no checkpoint yet" in line
    require_same(launch.run, undisturbed[0])
    plan = json.loads((launch.run / "plan.json").read_text())
    assert plan["gradient_checkpointing"] is True
    assert [rank["micro_batch"] for rank in plan["ranks"]] == [1, 1]


def test_without_a_remedy_the_alternatives_are_named(config: str, variables: dict[str, str], tmp_path: Path) -> None:
    words = ("TRAIN_BATCH_SIZE=1", "TRAIN_GRADIENT_CHECKPOINTING=false")
    with start(variables | {"RUNS_DIR": str(tmp_path / "runs")}, "train", config, *words, name="end") as launch:
        launch.wait_for_step(1)
        limit_address_space(launch.workers()[0], 60)
        code, output = launch.end()
    assert code == 75, output
    assert "the micro-batch is 1 already and gradient checkpointing is off as configured" in output
    (ways,) = [line for line in output.splitlines() if line.startswith("hint: choose one: ")]
    assert "TRAIN_GRADIENT_CHECKPOINTING=true: " in ways and "MODEL_MAX_SEQ_LEN=" in ways
    assert "make resume RUN=end" in output and "Traceback" not in output
    assert [event["event"] for event in launch.events()] == ["started", "failed"]
    assert launch.events()[-1]["cause"] == "out_of_memory", "a container's entry point goes by it (schedulers.entry)"
    assert "Traceback" in (launch.run / "logs" / "rank0.log").read_text()
    record = json.loads((launch.run / "logs" / "exit-rank0.json").read_text())
    assert (record["code"], record["cause"]) == (75, "out_of_memory")
    assert (record["doing"]["phase"], record["doing"]["step"], len(record["doing"]["rows"])) == ("training", 2, 1)


@pytest.mark.parametrize(
    ("command", "way", "room"),  # MiB; four long rows take 750, two 380, by stages or slices half of that
    [
        pytest.param("train-deepspeed", "", 550, marks=pytest.mark.long),
        pytest.param("train-fsdp", "", 550, marks=pytest.mark.long),
        ("train-distributed", "LAUNCH_STRATEGY=pipeline", 280),
        pytest.param("train-distributed", "LAUNCH_TENSOR_PARALLEL=2", 280, marks=pytest.mark.long),
    ],
)
@pytest.mark.broad
def test_shards_and_parts_continue_from_their_checkpoint(
    command: str, way: str, room: int, config: str, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    words = ("NUM_GPUS=2", "TRAIN_BATCH_SIZE=4", *way.split())
    with start(variables, command, config, *words, name=f"{command}{way}".replace("_", "-")) as launch:
        launch.wait_for_step(1)
        limit_address_space(launch.workers()[1], room)
        line = end(launch)
    assert f"micro-batch x accumulation 4 x {2 if way else 1} -> 2 x {4 if way else 2} on every rank" in line
    assert "continuing from step-000001" in line
    require_same(launch.run, undisturbed[0], copies=2 if way else 1)


def held_by(folder: Path) -> int:
    """Return the bytes of a cgroup's processes, without the page cache."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields["anon"])


def test_a_rank_that_the_kernel_kills_halves_the_micro_batch(
    config: str, variables: dict[str, str], undisturbed: tuple[Path, int]
) -> None:
    with (
        memory_limit(2**40) as cgroup,
        start(variables, "train-distributed", config, "NUM_GPUS=2", "TRAIN_BATCH_SIZE=4", name="killed") as launch,
    ):
        move(launch.process.pid, cgroup)
        launch.wait_for_step(1)
        # Two ranks with four long rows each take 1,500 MiB in step 2, with two each 750.
        limit_memory(cgroup, held_by(cgroup) + 1150 * MIB)
        line = end(launch)
    assert "was killed by SIGKILL because memory ran out (`" in line
    assert str(cgroup) in line
    assert "micro-batch x accumulation 4 x 1 -> 2 x 2 on every rank" in line
    assert "global batch 8 as before; continuing from step-000001" in line
    require_same(launch.run, undisturbed[0])
    (recovery,) = json.loads((launch.run / "training_metrics.json").read_text())["recoveries"]
    assert recovery["rank"] in (0, 1)
    assert recovery["doing"] == {}
