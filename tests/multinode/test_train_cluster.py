"""`make train-cluster` on machines of namespaces: each has its own files, its sshd and a link of 1 Gb/s; only the first
has model and data.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from tests.conftest import metrics
from tests.home_machines import Home, home
from tests.lan import losses
from tests.memory_runs import heavy_config

pytestmark = pytest.mark.broad


def worlds(run: RunFolder) -> list[int]:
    """Return the world sizes of the steps, in order."""
    return [count for count, _ in itertools.groupby(len(row["rank_rows"]) for row in metrics(run.path))]


def events(run: RunFolder) -> list[str]:
    """Return node 0's events."""
    rows = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [row["event"] for row in rows if row["node"] == 0]


@pytest.fixture
def machines(tmp_path: Path, tiny: Path, request: pytest.FixtureRequest) -> Iterator[Home]:
    with home(tmp_path, tiny, getattr(request, "param", 3)) as home_machines:
        yield home_machines


@pytest.mark.slow
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_two_machines_train_as_one_process_and_leave_nothing_behind(machines: Home) -> None:
    """Code, model and data come to the second; losses are those of one process; logs are here, and nothing is left
    there.
    """
    machines.train("two")
    machines.finish()
    run, output = machines.run("two"), machines.said()
    assert len(metrics(run.path)[0]["rank_tokens"]) == 2
    assert losses(run) == pytest.approx(machines.alone(), rel=1e-5)
    assert run.rank_log(1).read_text(), "the log of rank 1 is on the first machine"
    assert "node2 | node 1 (node2): meeting the other nodes" in output, output
    assert "done: " in output and "make infer RUN=two" in output
    project = machines.own(1, "project")
    assert (machines.own(1, "models") / "tiny" / "config.json").is_file() and (
        project / "sft_play" / "__main__.py"
    ).is_file()
    assert not (project / ".git").exists(), "only what git knows"
    log = (machines.net.folder / "ssh" / "node2.log").read_text()
    assert log.count("Accepted publickey") == 1, "all commands share one connection"
    machines.all_free(0, 1)


@pytest.mark.long
def test_three_machines_are_watched_stopped_and_resumed_from_one(machines: Home) -> None:
    """Three ranks; status and a log while they train, a second command refused, a stop from elsewhere, a resume; losses
    as of one process.
    """
    machines.train("three", "TRAIN_MAX_STEPS=5000", "TRAIN_SAVE_STEPS=5000")
    machines.until_step("three", 12)
    trained = machines.started[-1]
    rows = json.loads(machines.type("cluster-status", "JSON=1"))
    assert [(row["host"], row["name"], row["state"]) for row in rows] == [
        (f"node{k + 1}", "three", "running") for k in range(3)
    ]
    assert machines.type("cluster-logs", "RUN=three", "RANK=2").strip()
    assert re.search(r"^node2 \| three +running", machines.type("cluster-status"), re.MULTILINE)
    machines.train("three")
    assert machines.end() == 2 and "exists already" in machines.said(), machines.said()
    machines.start("train-cluster", "RUN=three")
    assert machines.end() == 2 and "the run `three` is in use" in machines.said(), machines.said()
    output = machines.type("cluster-stop", "RUN=three")
    assert "node1 | stopped by SIGTERM" in output and f"CLUSTER={machines.inventory} RUN=three" in output, output
    machines.started.append(trained)
    machines.finish(143, 10)
    machines.all_free(0, 1, 2)
    assert re.search(r"^node3 \| three +stopped", machines.type("cluster-status"), re.MULTILINE)
    output = machines.type("cluster-stop", "RUN=three", code=2)
    assert "nothing trains `three` now" in output, output
    run = machines.run("three")
    steps = metrics(run.path)[-1]["step"] + 2
    assert "has no random states" not in machines.resume("three", f"TRAIN_MAX_STEPS={steps}"), (
        "each rank continues with its own"
    )
    assert [row["step"] for row in metrics(run.path)] == list(range(1, steps + 1))
    assert losses(run)[:12] == pytest.approx(machines.alone("TRAIN_MAX_STEPS=12"), rel=1e-5)
    assert sorted(path.name for path in run.logs.glob("rank*.log")) == ["rank0.log", "rank1.log", "rank2.log"]


@pytest.mark.long
@pytest.mark.parametrize("machines", [4], indirect=True)
def test_a_run_continues_on_two_machines_after_a_cut_link_and_a_fourth_joins(machines: Home) -> None:
    """The global batch stays, and so do the rows of every step: tokens and losses are those of one process."""
    machines.train("cut", "CLUSTER_HOSTS=node1 node2 node3", "TRAIN_MAX_STEPS=200", "TRAIN_SAVE_STEPS=2")
    machines.until_step("cut", 4)
    machines.net.link(2, up=False)
    began = time.monotonic()
    machines.finish(75, 90)
    machines.all_free(0, 1, seconds=1)
    machines.all_free(2, seconds=max(5, 40 - (time.monotonic() - began)))  # what is cut off ends by itself
    output = machines.said()
    assert "error: rank 2 (node3) cannot be reached: node 2 (node3) has been silent" in output, output
    run = machines.run("cut")
    last = max(int(path.name[5:]) for path in run.checkpoints.glob("step-*")) + 8
    machines.resume("cut", "CLUSTER_HOSTS=node1 node2", f"TRAIN_MAX_STEPS={last - 4}")
    machines.net.link(2, up=True)
    machines.resume("cut", f"TRAIN_MAX_STEPS={last}")
    rows = metrics(run.path)
    assert [row["step"] for row in rows] == list(range(1, last + 1)) and worlds(run) == [3, 2, 4]
    assert losses(run) == pytest.approx(machines.alone(f"TRAIN_MAX_STEPS={last}"), rel=1e-3)
    whole = metrics(machines.run("alone").path)
    assert [sum(row["rank_tokens"]) for row in rows] == [sum(row["rank_tokens"]) for row in whole]
    machines.all_free(0, 1, 2, 3)


@pytest.mark.long
def test_a_host_that_comes_back_joins_the_restart(machines: Home) -> None:
    """Ctrl-C ends it, soon and on all machines."""
    process = machines.train("back", "TRAIN_MAX_STEPS=20000", "TRAIN_SAVE_STEPS=3", "LAUNCH_MAX_RESTARTS=1")
    machines.until_step("back", 4)
    machines.net.link(2, up=False)
    machines.until(lambda: "restarting: rank 2 (node3) cannot be reached" in machines.said())
    run = machines.run("back")
    reached = metrics(run.path)[-1]["step"]
    machines.net.link(2, up=True)
    machines.until_step("back", reached + 2)
    process.send_signal(signal.SIGINT)
    output = machines.finish(130, 25)
    assert "stopping all hosts" in output and f"make train-cluster CLUSTER={machines.inventory} RUN=back" in output, (
        output
    )
    steps = [row["step"] for row in metrics(run.path)]
    assert steps == list(range(1, len(steps) + 1)) and worlds(run) == [3], "each step is made once, by all"
    machines.all_free(0, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_memory_that_runs_out_on_one_machine_halves_the_micro_batch_on_all(machines: Home) -> None:
    """The second gets too little address space for four long rows, which is what each rank has in step 2; two fit."""
    seen, own = machines.folder / "lan" / "models", machines.own(0, "models")
    machines.config = machines.folder / "heavy.yaml"
    machines.config.write_text(heavy_config(own / "heavy").read_text().replace(str(own), str(seen)))
    undisturbed = machines.alone("TRAIN_BATCH_SIZE=2")
    machines.train("short", "TRAIN_BATCH_SIZE=4")
    machines.until_step("short", 1)
    run = machines.run("short")
    for pid in machines.net.workers(1):
        size = int(Path(f"/proc/{pid}/status").read_text().split("VmSize:")[1].split()[0]) * 1024
        resource.prlimit(pid, resource.RLIMIT_AS, (size + 550 * 2**20,) * 2)  # four long rows take 750 MiB, two 380
    output = machines.finish()
    (line,) = [line for line in output.splitlines() if line.startswith("recovering: ")]
    assert (
        line.startswith("recovering: rank 1 (node2)")
        and "micro-batch x accumulation 4 x 1 -> 2 x 2 on every rank" in line
    )
    assert "make resume" not in output, "no launcher says what to type"
    assert [row["step"] for row in metrics(run.path)] == [1, 2, 3], "each step is made once"
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert {sum(row["rank_rows"]) for row in metrics(run.path)} == {8}
    assert events(run) == ["started", "recovered", "finished"]
    machines.all_free(0, 1)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_killed_controller_leaves_no_process(machines: Home) -> None:
    process = machines.train("orphan", "TRAIN_MAX_STEPS=2000", "TRAIN_SAVE_STEPS=1000")
    machines.until_step("orphan", 2)
    os.killpg(process.pid, signal.SIGKILL)
    machines.all_free(0, 1, seconds=240)
    assert list(machines.run("orphan").checkpoints.glob("step-*")), "the launchers had it saved"


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_broken_ssh_connection_saves_and_stops_the_run(machines: Home) -> None:
    """The launcher behind it gets the signal of a closed terminal: all save and leave."""
    machines.train("loose", "TRAIN_MAX_STEPS=2000", "TRAIN_SAVE_STEPS=1000")
    machines.until_step("loose", 2)
    for pid in machines.net.pids(0):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh":
                os.kill(pid, signal.SIGKILL)
    output = machines.finish(143, 60)
    assert f"hint: resume it with: make train-cluster CLUSTER={machines.inventory} RUN=loose" in output, output
    assert list(machines.run("loose").checkpoints.glob("step-*"))
    machines.all_free(0, 1, seconds=60)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_run_that_cannot_start_is_one_error_with_its_remedy(machines: Home) -> None:
    """Each fault is one error with its remedy, and no run starts."""
    faults: list[tuple[dict[str, Any], str, str]] = [
        (
            {"python": "/nowhere/bin/python"},
            "no environment: no Python `/nowhere/bin/python`",
            "make cluster-install CLUSTER=",
        ),
        ({"gpus": 4}, "`gpus: 4` in the inventory, but its driver shows 0", ""),
        ({}, "`data.sync` is `shared`, but it does not see this machine's folders of `RUNS_DIR`, `SFT_PLAY_CACHE`", ""),
    ]
    for keys, text, remedy in faults:
        machines.write_inventory({"node2": keys})
        machines.train("bad", f"DATA_SYNC={'rsync' if keys else 'shared'}")
        output = machines.finish(3)
        assert f"host `node2`: {text}" in output and remedy in output, output
        assert not machines.run("bad").path.exists() and "Traceback" not in output, output


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_installation_reports_a_failure_and_continues_when_repeated(machines: Home) -> None:
    """An environment that cannot be filled (no network), then one that is there: the failure is reported, and the same
    command continues.
    """
    project = machines.own(1, "project")
    machines.write_inventory(python=".venv/bin/python")
    output = machines.type("cluster-install", code=3)
    assert "node2 | making a virtual environment in .venv" in output, output
    assert re.search(r"failed  node2: `make install` ended with code \d+: \w.*torch", output), output
    assert "fix the error above and repeat the command" in output and "ready  node1" in output
    assert (project / "scripts" / "install.sh").is_file()
    (own,) = (project / ".venv" / "lib").glob("python*/site-packages")
    (own / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (project / ".venv" / ".runtime").touch()
    output = machines.type("cluster-install")
    assert "node2 | installed; next: make quickstart" in output, output
    assert re.search(r"ready  node2: Python 3\.\d+\.\d+, torch \d", output), output


@pytest.mark.long
def test_machines_may_share_one_disk(tmp_path: Path, tiny: Path) -> None:
    """Run, cache and models on a disk that both see: one checkpoint holds the states of all ranks, and no log is
    written twice.
    """
    with home(tmp_path, tiny, 2, own=["project"]) as machines:
        machines.train("disk", "TRAIN_MAX_STEPS=2", "DATA_SYNC=shared", "TRAIN_SAVE_STEPS=1")
        machines.finish()
        machines.resume("disk", "TRAIN_MAX_STEPS=3")
        run = machines.run("disk")
        assert [row["step"] for row in metrics(run.path)] == [1, 2, 3]
        assert len(list(run.checkpoint(2).glob("rng-rank*.safetensors"))) == 2
        first = run.rank_log(1).read_text().splitlines()[0]
        assert run.rank_log(1).read_text().count(first) <= 2, "once a start"
        assert not (run.path / "random").exists()
        machines.all_free(0, 1)
