"""Run names and reservations, the workers' environment, ports, and rendered settings."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.errors import UserError
from sft_play.launch.attempt import show_launch, worker_arguments
from sft_play.launch.environment import Node, extensions_folder, remove_stale_build_locks, worker_environment
from sft_play.launch.run_folder import lock_run, record_event, reserve_folder
from sft_play.launch.runs import holders
from sft_play.runs.folder import RunFolder
from tests.unit.test_deepspeed_json import make_plan


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_second_node_joins_once() -> None:
    with reserve_folder("d") as run:
        record_event(run, "started", node_rank=0)
        with reserve_folder("d", node_rank=1) as joined:
            assert joined.path == run.path
            record_event(joined, "started", node_rank=1)
        with pytest.raises(UserError, match="exists already"), reserve_folder("d", node_rank=1):
            pass


def test_each_of_several_unnamed_runs_has_its_own_folder(runs: Path) -> None:
    def take(_: int) -> str:
        with reserve_folder("demo-20261121-051500", unnamed=True) as run:
            record_event(run, "started")
            return run.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(take, range(8)))
    assert sorted(names) == sorted(
        ["demo-20261121-051500", *(f"demo-20261121-051500.{number}" for number in range(2, 9))]
    )
    assert all((runs / name / "events.jsonl").read_text().count("started") == 1 for name in names)


STRAY = {
    "PET_NNODES": "3",
    "RANK": "5",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "x",
    "MASTER_PORT": "1",
    "LOCAL_RANK": "2",
    "MAKEFLAGS": " -- A=1",
    "ACCELERATE_USE_FSDP": "true",
    "TORCHELASTIC_RUN_ID": "q",
    "HF_TOKEN": "secret-token",
    "NCCL_DEBUG": "INFO",
    "HOME": "/h",
    "AIM_REPO": "aim://x",
}


def test_stray_variables_are_removed() -> None:
    environment = worker_environment(make_plan(strategy="ddp"), Node(interface="lo"), STRAY, cpu_threads=8)
    assert environment.variables.keys() & STRAY.keys() == {"HF_TOKEN", "NCCL_DEBUG", "HOME", "AIM_REPO"}
    assert environment.variables["HF_TOKEN"] == "secret-token"
    assert environment.variables["OMP_NUM_THREADS"] == "4"
    assert environment.variables["ACCELERATE_USE_CPU"] == "true"
    assert environment.variables["GLOO_SOCKET_IFNAME"] == "lo"
    shown = show_launch(worker_arguments(RunFolder(Path("runs/x")), Node()), environment)
    assert "secret-token" not in shown
    assert "NCCL_DEBUG=INFO  (yours)" in shown
    assert "AIM_REPO=aim://x  (yours)" in shown


def test_consumer_cards_get_no_peer_to_peer_unless_the_user_sets_it() -> None:
    rank = replace(make_plan().ranks[0], device="cuda:0", device_name="NVIDIA GeForce RTX 5090")
    plan = make_plan(device="cuda", strategy="ddp", ranks=(rank, rank))
    assert worker_environment(plan, Node(), {}, cpu_threads=2).variables["NCCL_P2P_DISABLE"] == "1"
    mine = worker_environment(plan, Node(), {"NCCL_P2P_DISABLE": "0", "OMP_NUM_THREADS": "7"}, cpu_threads=2)
    assert mine.variables["NCCL_P2P_DISABLE"] == "0"
    assert mine.variables["OMP_NUM_THREADS"] == "7"


def test_each_environment_builds_the_extensions_of_deepspeed_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of one clone would replace the library that a rank of another is about to load."""

    def folder(ambient: Mapping[str, str] = {}) -> str:
        plan = make_plan(strategy="zero2")
        return worker_environment(plan, Node(), ambient, cpu_threads=2).variables["TORCH_EXTENSIONS_DIR"]

    ours = folder()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sys.prefix", "/another/clone/.venv")
        assert folder() != ours
    monkeypatch.setattr("socket.gethostname", lambda: "another-machine")
    assert folder() != ours
    assert folder({"TORCH_EXTENSIONS_DIR": "/mine"}) == "/mine"


@pytest.mark.parametrize("is_typed", [False, True])
def test_the_lock_of_a_killed_build_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_typed: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    typed = str(tmp_path / "mine") if is_typed else None
    lock = Path(typed or extensions_folder()) / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):  # as torch's builder holds it
        remove_stale_build_locks(typed)
        assert lock.exists()
    if is_typed:  # another machine may build there
        remove_stale_build_locks(typed)
        assert lock.exists()
        os.utime(lock, (0, 0))
    remove_stale_build_locks(typed)
    assert not lock.exists()


def test_runs_start_on_a_disk_without_locks(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lustre without `-o flock`, or NFS without its lock server, answers so."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refused)
    run = RunFolder(runs / "mine")
    run.path.mkdir(parents=True)
    assert holders(run) == {}
    with lock_run(run):
        error = capsys.readouterr().err
        assert f"warning: {run.path}: this disk has no file locks (No locks available)" in error and "-o flock" in error
        ((node_rank, launcher),) = holders(run).items()
        assert node_rank == 0 and launcher and launcher.pid == os.getpid(), "`make stop` finds it all the same"
    assert holders(run) == {}
