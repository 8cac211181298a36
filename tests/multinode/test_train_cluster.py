"""`make train-cluster` on machines of namespaces: each has its own files, its sshd and a link of 1 Gb/s; only the first has model and data."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from tests.conftest import metrics
from tests.home_machines import SECONDS, Home
from tests.lan import is_worker, lan
from tests.memory_runs import heavy_config


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in metrics(run.path)]


def worlds(run: RunFolder) -> list[int]:
    """The numbers of ranks that made the steps, one after the other."""
    return [count for count, _ in itertools.groupby(len(row["rank_rows"]) for row in metrics(run.path))]


def events(run: RunFolder) -> list[str]:
    """What node 0 recorded."""
    rows = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [row["event"] for row in rows if row["node"] == 0]


@pytest.fixture
def machines(tmp_path: Path, tiny: Path, request: pytest.FixtureRequest) -> Iterator[Home]:
    folder = tmp_path / "lan"
    own = [folder / name for name in ("runs", "cache", "project", "models")]
    with lan(folder, nodes=getattr(request, "param", 3), private=own) as net:
        yield Home(net, tmp_path, tiny, net.hosts[0].private[folder / "models"])


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_panel_on_a_terminal(machines: Home) -> None:
    """The run's panel stands below the lines of the machines; rank 0's lines of progress are left out."""
    machines.start("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=panel", terminal=True, TERM="xterm", COLUMNS="100")
    assert machines.end() == 0, machines.said()
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", machines.said())
    panels = re.findall(r"─ panel: (\w+) ─.*?╯", said, re.DOTALL)
    assert "loading" in panels, said
    last = said[said.rindex("─ panel: ") :]
    assert "4/4" in last and "rank 1" in last and "step-000004" in last, last
    assert "node2  finished" in said and "done: " in said
    assert "step 4/4: loss" not in said
    machines.all_free(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_two_machines(machines: Home) -> None:
    """Code, model and data come to the second; losses are those of one process; logs are here, and nothing is left there."""
    code, said = machines.type("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=two")
    assert code == 0, said
    run = machines.run("two")
    assert len(metrics(run.path)[0]["rank_tokens"]) == 2
    assert losses(run) == pytest.approx(machines.alone(), rel=1e-5)
    assert run.rank_log(1).read_text(), "the log of rank 1 is on the first machine"
    assert "node1  training  step" in said and "node2  training  step" in said and "tokens/s" in said, said
    assert "done: " in said and "make infer RUN=two" in said
    private = machines.net.hosts[1].private
    assert (private[machines.folder / "lan" / "models"] / "tiny" / "config.json").is_file()
    assert (private[machines.folder / "lan" / "project"] / "sft_play" / "__main__.py").is_file()
    assert not (private[machines.folder / "lan" / "project"] / ".git").exists(), "only what git knows"
    log = (machines.net.folder / "ssh" / "node2.log").read_text()
    assert log.count("Accepted publickey") == 1, "all commands share one connection"
    machines.all_free(0, 1)


@pytest.mark.long
def test_three_machines_seen_from_one(machines: Home) -> None:
    """Three ranks; status and a log while they train, a second command refused, a stop from elsewhere; losses as of one process."""
    machines.start(
        "train-cluster", f"CONFIG={machines.config}", "RUN_NAME=three", "TRAIN_MAX_STEPS=5000", "TRAIN_SAVE_STEPS=5000"
    )
    machines.until_step("three", 12)
    trained = machines.started[-1]
    code, said = machines.type("cluster-status", "JSON=1")
    assert code == 0, said
    rows = json.loads(said)
    assert [(row["host"], row["run"], row["ranks"]) for row in rows] == [
        ("node1", "three", [0]),
        ("node2", "three", [1]),
        ("node3", "three", [2]),
    ]
    assert all(row["processes"] >= 2 and row["loss"] and len(row["memory_gib"]) == 1 for row in rows)
    code, said = machines.type("cluster-logs", "RUN=three", "RANK=2")
    assert code == 0 and said.strip(), said
    code, said = machines.type("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=three")
    assert code == 2 and "exists already" in said, said
    code, said = machines.type("cluster-stop", "RUN=three")
    assert code == 0 and "stopped by SIGTERM" in said and "RUN=three resumes it" in said, said
    machines.started.append(trained)
    assert machines.end(10) == 143, machines.said()
    machines.all_free(0, 1, 2)
    run = machines.run("three")
    alone = machines.alone("TRAIN_MAX_STEPS=12")
    assert len(alone) == 12 and losses(run)[:12] == pytest.approx(alone, rel=1e-5)
    assert sorted(path.name for path in run.logs.glob("rank*.log")) == ["rank0.log", "rank1.log", "rank2.log"]
    code, said = machines.type("cluster-status")
    assert code == 0 and re.search(r"node3 +idle", said), said
    code, said = machines.type("cluster-stop", "RUN=three")
    assert code == 2 and "no command of this machine trains `three`" in said, said


@pytest.mark.long
def test_ctrl_c_stops_all_hosts(machines: Home) -> None:
    process = machines.start(
        "train-cluster", f"CONFIG={machines.config}", "RUN_NAME=stopped", "TRAIN_MAX_STEPS=60", "TRAIN_SAVE_STEPS=50"
    )
    machines.until_step("stopped", 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert machines.end(40) == 130, machines.said()
    assert time.monotonic() - began < 25
    machines.all_free(0, 1, 2)
    said = machines.said()
    assert "stopping all hosts" in said and f"make train-cluster CLUSTER={machines.inventory} RUN=stopped" in said, said
    saved = max(int(path.name[5:]) for path in machines.run("stopped").checkpoints.glob("step-*"))
    code, said = machines.type("train-cluster", "RUN=stopped", f"TRAIN_MAX_STEPS={saved + 2}")
    assert code == 0, said
    assert metrics(machines.run("stopped").path)[-1]["step"] == saved + 2
    assert "has no random states" not in said, "each rank goes on with its own"


@pytest.mark.long
def test_a_link_is_cut_and_the_run_goes_on_with_two_and_then_three(machines: Home) -> None:
    words = ("TRAIN_MAX_STEPS=200", "TRAIN_SAVE_STEPS=2")
    machines.start("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=cut", *words)
    machines.until_step("cut", 4)
    machines.net.link(2, up=False)
    began = time.monotonic()
    machines.until(lambda: "cannot be reached" in machines.said())
    assert time.monotonic() - began < 30, machines.said()
    assert machines.end(60) == 75, machines.said()
    machines.all_free(0, 1, seconds=1)
    machines.all_free(2, seconds=max(5, 40 - (time.monotonic() - began)))  # what is cut off ends by itself
    said = machines.said()
    assert "error: rank 2 (node3) cannot be reached: node 2 (node3) has been silent" in said, said
    run = machines.run("cut")
    saved = max(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))
    machines.start("train-cluster", "RUN=cut", "CLUSTER_HOSTS=node1 node2", f"TRAIN_MAX_STEPS={saved + 4}")
    assert machines.end() == 0, machines.said()
    machines.net.link(2, up=True)
    code, said = machines.type("train-cluster", "RUN=cut", f"TRAIN_MAX_STEPS={saved + 8}")
    assert code == 0, said
    assert worlds(run) == [3, 2, 3]
    assert {sum(row["rank_rows"]) for row in metrics(run.path)} == {6}
    assert losses(run) == pytest.approx(machines.alone(f"TRAIN_MAX_STEPS={saved + 8}")[: saved + 8], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("machines", [4], indirect=True)
def test_a_fourth_machine_joins_a_run_of_three(machines: Home) -> None:
    """The global batch stays, and so do the rows of every step: tokens and losses are those of one process."""
    start = ("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=more")
    code, said = machines.type(*start, "CLUSTER_HOSTS=node1 node2 node3", "TRAIN_MAX_STEPS=6")
    assert code == 0, said
    code, said = machines.type("train-cluster", "RUN=more", "TRAIN_MAX_STEPS=12")
    assert code == 0, said
    run = machines.run("more")
    found = metrics(run.path)
    assert [(row["step"], len(row["rank_rows"])) for row in found] == [(k, 3 if k < 7 else 4) for k in range(1, 13)]
    assert losses(run) == pytest.approx(machines.alone("TRAIN_MAX_STEPS=12"), rel=1e-3)
    whole = metrics(machines.run("alone").path)
    assert [sum(row["rank_tokens"]) for row in found] == [sum(row["rank_tokens"]) for row in whole]
    machines.all_free(0, 1, 2, 3)


@pytest.mark.long
def test_elastic_goes_on_with_those_that_are_left_and_takes_one_back(machines: Home) -> None:
    words = ("TRAIN_MAX_STEPS=20000", "TRAIN_SAVE_STEPS=3", "LAUNCH_ELASTIC=2:3")
    process = machines.start("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=grows", *words)
    machines.until_step("grows", 4)
    machines.net.link(2, up=False)
    run = machines.run("grows")
    machines.until(lambda: worlds(run) == [3, 2])
    told = machines.net.hosts[2].private[machines.folder / "lan" / "cache"] / "cluster" / "grows"
    told.rename(told.with_name("away"))
    told.write_text("")  # it comes back, and what it is told of the run cannot be written there
    machines.net.link(2, up=True)
    unready = re.compile(r"not ready: host `node3`: .*cluster/grows")
    machines.until(lambda: bool(unready.search(machines.said())))
    step = metrics(run.path)[-1]["step"]
    machines.until_step("grows", step + 6)
    assert worlds(run) == [3, 2], "the run is not stopped for a host that is not ready"
    assert len(unready.findall(machines.said())) == 1
    told.unlink()
    told.with_name("away").rename(told)
    machines.until(lambda: worlds(run) == [3, 2, 3])
    assert machines.said().count("`node3` answers again") == 1
    step = metrics(run.path)[-1]["step"]
    machines.until_step("grows", step + 2)
    process.send_signal(signal.SIGTERM)
    assert machines.end(40) == 143, machines.said()
    said = machines.said()
    assert "restarting: rank 2 (node3) cannot be reached" in said and "starting again with node 2 (node3)" in said, said
    steps = [row["step"] for row in metrics(run.path)]
    assert steps == list(range(1, len(steps) + 1)), "each step is made once"
    machines.all_free(0, 1, 2)


def workers(machines: Home, k: int) -> list[int]:
    """The processes that train on machine `k`."""
    return [pid for pid in machines.net.pids(k) if is_worker(pid)]


def kill_workers(machines: Home, k: int) -> bool:
    found = workers(machines, k)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_memory_that_runs_out_on_one_machine_halves_the_micro_batch_on_all(machines: Home) -> None:
    """The second gets too little address space for four long rows, which is what each rank has in step 2; two fit."""
    seen = machines.folder / "lan" / "models"
    own = machines.net.hosts[0].private[seen]
    machines.config = machines.folder / "heavy.yaml"
    machines.config.write_text(heavy_config(own / "heavy").read_text().replace(str(own), str(seen)))
    undisturbed = machines.alone("TRAIN_BATCH_SIZE=2")
    process = machines.start("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=short", "TRAIN_BATCH_SIZE=4")
    run, deadline = machines.run("short"), time.monotonic() + SECONDS
    while not (run.metrics.is_file() and metrics(run.path)):
        assert process.poll() is None and time.monotonic() < deadline, machines.said()
        time.sleep(0.02)
    for pid in workers(machines, 1):
        size = int(Path(f"/proc/{pid}/status").read_text().split("VmSize:")[1].split()[0]) * 1024
        resource.prlimit(pid, resource.RLIMIT_AS, (size + 550 * 2**20,) * 2)  # four long rows take 750 MiB, two 380
    assert machines.end() == 0, machines.said()
    said = machines.said()
    (line,) = [line for line in said.splitlines() if line.startswith("recovering: ")]
    assert line.startswith("recovering: rank 1 (node2)") and "micro-batch 4 x accumulation 1 -> 2 x 2 on every rank" in line
    assert "does not start again by itself" not in said + (run.logs / "node1.log").read_text(), "no launcher says what to type"
    assert [row["step"] for row in metrics(run.path)] == [1, 2, 3], "each step is made once"
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert {sum(row["rank_rows"]) for row in metrics(run.path)} == {8}
    assert events(run) == ["started", "recovered", "finished"]
    machines.all_free(0, 1)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_nothing_outlives_a_controller_that_is_killed(machines: Home) -> None:
    process = machines.start(
        "train-cluster", f"CONFIG={machines.config}", "RUN_NAME=orphan", "TRAIN_MAX_STEPS=2000", "TRAIN_SAVE_STEPS=1000"
    )
    machines.until_step("orphan", 2)
    os.killpg(process.pid, signal.SIGKILL)
    machines.all_free(0, 1, seconds=30)
    assert list(machines.run("orphan").checkpoints.glob("step-*")), "the launchers had it saved"


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_an_ssh_connection_that_breaks_ends_no_run(machines: Home) -> None:
    """One sentence says so; the ranks train on while node 0 answers, and nothing is left on either machine."""
    words = ("TRAIN_MAX_STEPS=60", "TRAIN_SAVE_STEPS=20")
    machines.start("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=loose", *words)
    machines.until_step("loose", 2)
    for pid in machines.net.pids(0):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh":
                os.kill(pid, signal.SIGKILL)
    machines.until(lambda: "warning: the SSH connection to `node2` has ended: its ranks continue training" in machines.said())
    machines.run("loose").rank_log(1).unlink(missing_ok=True)
    assert machines.end() == 0, machines.said()
    assert machines.said().count("SSH connection to") == 1 and "restarting" not in machines.said(), machines.said()
    assert [row["step"] for row in metrics(machines.run("loose").path)] == list(range(1, 61)), "each step is made once"
    assert worlds(machines.run("loose")) == [2]
    here, there = (machines.run("loose", k).rank_log(1) for k in (0, 1))
    assert here.read_text() == there.read_text() != "", "logs come at the end"
    machines.all_free(0, 1, seconds=30)


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_what_cannot_be_started(machines: Home) -> None:
    """Each fault is one error with its remedy, and no run is begun."""
    net, folder = machines.net, machines.folder
    common = {"folder": str(folder / "lan" / "project")}

    def refused(hosts: dict[str, dict[str, Any]], *words: str) -> str:
        machines.inventory = net.inventory(folder / "bad.yaml", hosts, defaults=common)
        found, said = machines.type("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=bad", *words)
        assert found == 3, said
        assert not machines.run("bad").path.exists() and "Traceback" not in said, said
        return said

    absent = refused({"node2": {"python": "/nowhere/bin/python"}})
    assert (
        "host `node2`: no environment: no Python `/nowhere/bin/python`" in absent and "make cluster-install CLUSTER=" in absent
    ), absent
    few = refused({"node2": {"gpus": 4}})
    assert "host `node2`: `gpus: 4` in the inventory, but its driver shows 0" in few, few
    away = refused({"node2": {"address": "192.168.77.99"}})
    assert "host `node2`" in away and "cannot be reached" in away, away
    keys = folder / "lan" / "ssh" / "authorized_keys"
    kept = keys.read_text()
    keys.write_text("")
    assert "refuses this machine's key" in refused({})
    keys.write_text(kept)
    apart = refused({}, "DATA_SYNC=shared")
    assert (
        "host `node2`: `data.sync` is `shared`, but it does not see this machine's folders of `RUNS_DIR`, `SFT_PLAY_CACHE`"
        in apart
    ), apart


@pytest.mark.long
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_install(machines: Home) -> None:
    """An environment that cannot be filled (no network), then one that is there: what failed is said, and the same command goes on."""
    project = machines.net.hosts[1].private[machines.folder / "lan" / "project"]
    common = {"folder": str(machines.folder / "lan" / "project"), "python": ".venv/bin/python"}
    machines.inventory = machines.net.inventory(machines.folder / "install.yaml", defaults=common)
    code, said = machines.type("cluster-install")
    assert code == 3, said
    assert "node2 | making a virtual environment in .venv" in said, said
    assert re.search(r"failed  node2: scripts/install\.sh ended with code \d+: \w.*torch", said), said
    assert "fix the error above and repeat the command" in said and "ready  node1" in said
    assert (project / "scripts" / "install.sh").is_file()
    site = subprocess.run(
        [machines.net.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    (own,) = (project / ".venv" / "lib").glob("python*/site-packages")
    (own / "tests.pth").write_text(site + "\n")
    (project / ".venv" / ".runtime").touch()
    for _ in range(2):
        code, said = machines.type("cluster-install")
        assert code == 0, said
        assert "node2 | the environment in .venv is up to date" in said and re.search(
            r"ready  node2: Python 3\.\d+\.\d+, torch \d", said
        ), said
    (project / "left.py").write_text("")
    code, said = machines.type("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=installed", "TRAIN_MAX_STEPS=1")
    assert code == 0, said
    assert (project / "left.py").exists(), "what the synchronisation did not bring stays"


@pytest.mark.long
def test_one_disk_for_all(tmp_path: Path, tiny: Path) -> None:
    """Runs, cache and models on a disk that both see: one checkpoint holds the states of all ranks, and no log is written twice."""
    folder = tmp_path / "lan"
    with lan(folder, nodes=2, private=[folder / "project"]) as net:
        machines = Home(net, tmp_path, tiny, folder / "models")
        words = ("DATA_SYNC=shared", "TRAIN_SAVE_STEPS=1")
        code, said = machines.type("train-cluster", f"CONFIG={machines.config}", "RUN_NAME=disk", "TRAIN_MAX_STEPS=2", *words)
        assert code == 0, said
        code, said = machines.type("train-cluster", "RUN=disk", "TRAIN_MAX_STEPS=3")
        assert code == 0, said
        run = RunFolder(folder / "runs" / "disk")
        assert [row["step"] for row in metrics(run.path)] == [1, 2, 3]
        assert len(list(run.checkpoint(2).glob("rng-rank*.safetensors"))) == 2
        first = run.rank_log(1).read_text().splitlines()[0]
        assert run.rank_log(1).read_text().count(first) <= 2, "once a start"
        assert not (run.path / "random").exists()
        machines.all_free(0, 1)
