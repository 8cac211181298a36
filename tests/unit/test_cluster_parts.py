"""Parts of `train-cluster` that need no second machine: what came first, the machines' lines, where files stand on another host."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from sft_play.cluster import board, cause, remote
from sft_play.cluster.agent import BOOT, Agent, refused, request_of
from sft_play.cluster.bring import place_there
from sft_play.cluster.facts import Facts
from sft_play.cluster.install import venv_of
from sft_play.cluster.session import Node, Session
from sft_play.cluster.ssh import NOT_A_FOLDER, ended_with_us, waited_for
from sft_play.cluster.status import _rows
from sft_play.config.cluster import Host, Inventory
from sft_play.config.rules import elastic_bounds
from sft_play.errors import DataError, UserError
from sft_play.launch.node import Stop
from sft_play.launch.preparation import DELIVERED, delivered
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, ResolvedModel

HOSTS = tuple(Host(name=f"node{k}", address=f"192.168.77.1{k}") for k in (1, 2, 3))
RANKS = [range(1), range(1, 2), range(2, 3)]
PEER = {"code": 75, "cause": "peer", "error": "RuntimeError: Connection closed by peer [192.168.77.12]:4711"}


def ended(tmp_path: Path, *nodes: Mapping[str, Any], asked: str = "") -> Session:
    """A session that is over, with what is known of each machine."""
    made = [Node(host=host, agent=cast(Agent, None), ended_at=1.0, **facts) for host, facts in zip(HOSTS, nodes, strict=True)]
    run = RunFolder(tmp_path)
    inventory = Inventory(hosts=HOSTS, network=None, ssh_config=None, path=tmp_path / "home.yaml")
    return Session(
        inventory=inventory, run=run, nodes=made, inbox=queue.Queue(), logs=board.Logs(run), board=board.Board(run, []), console=sys.stdout,
        stop=Stop(), streams=[False] * 3, wanted=lambda: False, asked=asked,
    )  # fmt: skip


def test_the_error_of_a_rank_comes_before_what_others_saw_of_it(tmp_path: Path) -> None:
    own = {2: ({"code": 4, "error": "error: the rows are damaged"}, 9.0)}
    session = ended(
        tmp_path,
        {"code": 75, "records": {0: (PEER, 8.0)}},
        {"code": 75, "records": {1: (PEER, 8.5)}},
        {"code": 4, "records": own},
    )
    outcome = cause.judge(session, RANKS)
    assert (outcome.code, outcome.rank) == (4, 2)
    assert outcome.message.startswith("error: host `node3`: the rows are damaged")


def test_a_lost_host_comes_before_the_silence_that_others_report(tmp_path: Path) -> None:
    silent = {"code": 75, "error": "rank 2 (node3) has been silent for 20 s", "blames": 2, "cause": "unreachable"}
    session = ended(
        tmp_path, {"code": 75, "records": {0: (silent, 0.5)}}, {"code": 75, "records": {1: (PEER, 0.4)}}, {"lost": "no answer"}
    )
    outcome = cause.judge(session, RANKS)
    assert (outcome.code, outcome.rank, outcome.cause) == (75, 2, "unreachable")
    assert "host `node3` (192.168.77.13) disappeared: no answer; rank 2 ran there" in outcome.message


def test_a_rank_without_a_record_is_named_by_its_own_launcher(tmp_path: Path) -> None:
    killed = {
        "event": "failed",
        "code": 75,
        "rank": 1,
        "error": "error: rank 1 (node2) was killed by SIGKILL; all other ranks were stopped",
    }
    peers = {"event": "failed", "code": 75, "rank": 0, "cause": "peer", "error": "Connection closed by peer"}
    session = ended(
        tmp_path,
        {"code": 75, "event": peers, "records": {0: (PEER, 0.1)}},
        {"code": 75, "event": killed},
        {"code": 75, "records": {2: (PEER, 0.1)}},
    )
    outcome = cause.judge(session, RANKS)
    assert (outcome.code, outcome.rank) == (75, 1) and "host `node2`: rank 1 (node2) was killed by SIGKILL" in outcome.message


def test_ends_that_are_none_of_a_failure(tmp_path: Path) -> None:
    assert cause.judge(ended(tmp_path, *[{"code": 0}] * 3), RANKS).code == 0
    assert cause.judge(ended(tmp_path, *[{"code": 143}] * 3), RANKS).code == 143, "stopped by somebody else"
    assert cause.judge(ended(tmp_path, *[{"code": 143}] * 3, asked="grow"), RANKS).code == 143
    same = {"code": 2, "words": "error: `train.seed` is 1 on node 0, 2 on node 1"}
    told = cause.judge(ended(tmp_path, same, same, same), RANKS)
    assert (told.code, told.message) == (2, ""), "node 0 has said it on the console"
    other = cause.judge(ended(tmp_path, {"code": 75}, {"code": 3, "words": "x\nerror: no space"}, {"code": 75}), RANKS)
    assert (other.code, other.message) == (3, "error: host `node2`: no space")


def test_lines_of_machines() -> None:
    row = {"step": 4, "rank_tokens": [300, 100, 100], "tokens_per_second": 1000.0}
    speeds = board.host_speeds(row, RANKS)
    assert speeds == [600.0, 200.0, 200.0]
    assert board.lines(["desktop", "laptop", "old"], ["training", "training", "lost: gone"], row, 10, speeds) == [
        "  desktop  training  step 4/10  600 tokens/s",
        "  laptop   training  step 4/10  200 tokens/s",
        "  old      lost: gone",
    ]
    assert board.host_speeds({}, RANKS) == [None] * 3


@pytest.mark.parametrize(
    ("text", "bounds"), [("2:4", (2, 4)), ("1:1", (1, 1)), ("3:2", None), ("0:2", None), ("2", None), (None, None)]
)
def test_elastic(text: str | None, bounds: tuple[int, int] | None) -> None:
    assert elastic_bounds(text) == bounds


def test_where_files_stand_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    facts = Facts(
        host="b", home="/home/b", folder="/srv/sft", runs="/srv/sft/runs", cache="/big/cache", hub="/big/hub", python="3.11.2", versions={},
        code=True, gpus=1, rsync=True, shares_runs=False, shares_cache=False, linux=True,
        run_there=None,
    )  # fmt: skip
    hub = tmp_path / "hf" / "hub"
    assert place_there(tmp_path / "cache" / "data" / "train-1", facts, hub) == "/big/cache/data/train-1"
    assert place_there(hub / "models--a--b" / "snapshots" / "c", facts, hub) == "/big/hub/models--a--b/snapshots/c"
    assert place_there(Path("models/mine"), facts, hub) == "/srv/sft/models/mine"
    assert place_there(Path("/data/model"), facts, hub) == "/data/model"


def test_messages_of_hosts(tmp_path: Path) -> None:
    inventory = Inventory(hosts=HOSTS, network=None, ssh_config=None, path=Path("home.yaml"))
    absent = refused(HOSTS[1], inventory, 127, "sh: not found")
    assert absent.exit_code == 3 and "host `node2` has no environment" in absent.message
    assert absent.hint == "make it: make cluster-install CLUSTER=home.yaml"
    odd = refused(HOSTS[1], inventory, NOT_A_FOLDER, "")
    assert odd.message == "host `node2` has no environment: `folder` is `~/sft-play`, which is a file there"
    assert odd.hint == "give another `folder` in the inventory, or move that file away there"
    assert [next(_rows(HOSTS[1], one, []))["state"] for one in (absent, odd, refused(HOSTS[1], inventory, 255, ""))] == [
        "no environment", "no environment", "unreachable",
    ]  # fmt: skip
    remark = "Could not chdir to home directory /nonexistent: No such file or directory\n"
    barred = refused(HOSTS[2], inventory, 1, remark, "Welcome\nThis account is currently not available.\n")
    assert barred.message == "host `node3`: its user may not log in there: This account is currently not available."
    assert barred.hint and "`user`" in barred.hint
    broken = refused(replace(HOSTS[1], user="me", port=2200), inventory, 1, remark + "ImportError: no module x\n" + remark)
    assert broken.message == "host `node2`: its Python `.venv/bin/python` did not start, or failed: ImportError: no module x"
    assert broken.hint and "`ssh -p 2200 me@192.168.77.12`" in broken.hint
    assert "Could not chdir" in refused(HOSTS[1], inventory, 1, remark).message, "where nothing else was said"
    assert venv_of(HOSTS[0]) == ".venv"
    with pytest.raises(Exception, match="no environment's interpreter"):
        venv_of(Host(name="a", address="b", python="python3"))


def prepared_at(folder: Path) -> Prepared:
    model = ResolvedModel(name="m", path=str(folder), source="folder", revision=None, fingerprint="f", tokenizer_fingerprint="t")
    return Prepared(model=model, train=None, validation=None)


def test_what_the_master_brought_is_taken_only_by_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = RunFolder(tmp_path / "mine"), tmp_path / "prepared.json"
    monkeypatch.delenv(DELIVERED, raising=False)
    assert delivered(run) is None
    monkeypatch.setenv(DELIVERED, str(path))
    with pytest.raises(UserError, match="does not name what a cluster's master brought"):
        delivered(run)
    path.write_text(json.dumps({"run": "mine", "prepared": asdict(prepared_at(tmp_path))}))
    assert delivered(run) == prepared_at(tmp_path)
    with pytest.raises(UserError, match="is meant for the run `mine`, not for `other`"):
        delivered(RunFolder(tmp_path / "other"))
    path.write_text(json.dumps({"run": "mine", "prepared": asdict(prepared_at(tmp_path / "gone"))}))
    with pytest.raises(DataError, match="is not on this machine"):
        delivered(run)


def test_newer_checkpoints_of_a_machine_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6):
        (folder / f"step-{step:06d}").mkdir(parents=True)
    remote.one_checkpoint({"run": "run", "step": 4})
    assert [path.name for path in sorted(folder.glob("step-*"))] == ["step-000002", "step-000004"]
    assert len(list(folder.glob(".step-000006.set-aside-*"))) == 1, "nothing is deleted"


def test_programs_of_threads_end_with_the_command() -> None:
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(KeyboardInterrupt), waited_for(process), ended_with_us():
        raise KeyboardInterrupt
    assert process.wait(timeout=10) == -9


def test_the_program_beside_a_launcher_ends_well_while_somebody_listens(tmp_path: Path) -> None:
    words = {
        "argv": ["sh", "-c", "echo trained; exit 4"],
        "variables": {},
        "run": "one",
        "stream": False,
        "token": "of this test",
    }
    request = request_of(Host(name="old", address="203.0.113.1", folder=str(tmp_path)), "launch", node=0, **words)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(request.encode())
        process.stdin.flush()
        code = process.wait(timeout=60)
        told = [json.loads(line) for line in process.stdout.read().splitlines()]
        assert (code, process.stderr.read()) == (0, b"")
    assert {"out": "trained\n"} in told and told[-1] == {"ended": 4, "event": None, "left": 0}
