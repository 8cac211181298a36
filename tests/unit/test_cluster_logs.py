"""`cluster-logs` of a rank whose log is on another machine. The program over there is the real one; ssh is a program that runs it here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.cluster import status
from sft_play.cluster.hosts import python_of, request_of
from sft_play.cluster.remote import TOKEN, machine
from sft_play.config.call import parse_call
from sft_play.config.cluster import read_inventory
from sft_play.errors import UserError
from sft_play.runs.folder import RunFolder

SSH = """#!/bin/sh
while :; do case "$1" in -T|-tt) shift;; -F|-o|-p|-l) shift 2;; --) shift; break;; *) break;; esac; done
if [ "$1" = 203.0.113.2 ]; then echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; fi
shift; cd "$THERE" && RUNS_DIR="$THERE/runs" HOME="$THERE" exec sh -c "$*"
"""
SECONDS = 60.0


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder that the run `one` has on the other machine, where rank 1 trains; here are its folder and the log of rank 0."""
    home = tmp_path / "home"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (home / "sft-play").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("THERE", str(home))
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    away = {"folder": "~/sft-play", "python": sys.executable}
    hosts = {"off": {"address": "203.0.113.2", **away}, "old": {"address": "203.0.113.1", **away}}
    (tmp_path / "home.yaml").write_text(json.dumps({"hosts": hosts}))
    here, run = RunFolder(tmp_path / "runs" / "one"), RunFolder(home / "runs" / "one")
    for one in (here, run):
        one.logs.mkdir(parents=True)
    here.config.write_text("{}")
    here.rank_log(0).write_text("of the first\n")
    run.rank_log(1).write_text("step 1 é☃\rstep 2\nno end")
    return run


@pytest.fixture
def launcher(there: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the other machine's records name as the run's launcher."""
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, TOKEN: "of-this-test"})
    try:
        facts = {"token": "of-this-test", "node": 1, "launcher": process.pid, "machine": machine()}
        (there.path / ".cluster-node1.json").write_text(json.dumps(facts))
        yield process
    finally:
        process.kill()
        process.wait(timeout=SECONDS)


def logs(there: RunFolder, *words: str) -> int:
    inventory = there.path.parents[2] / "home.yaml"
    return status.logs(parse_call(["cluster-logs", f"CLUSTER={inventory}", "RUN=one", *words], COMMANDS, {}))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def test_a_log_of_another_machine_and_one_that_is_off(there: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(there, "RANK=1") == 0
    shown = capsys.readouterr()
    assert shown.out == "step 1 é☃\rstep 2\nno end" and "left out: host `off`" in shown.err and "cannot be reached" in shown.err
    assert logs(there, "RANK=1", "JSON=1") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rank"], told["host"], told["text"]) == (1, "old", "step 1 é☃\rstep 2\nno end")
    assert logs(there) == 0 and capsys.readouterr().out == "of the first\n"
    with pytest.raises(UserError, match="has no log of rank 2 on any host that can be reached") as error:
        logs(there, "RANK=2")
    assert error.value.hint == "there are those of ranks 0, 1"


def test_a_log_is_followed_while_its_launcher_lives(
    there: RunFolder, launcher: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    shown, codes = "", []

    def came(text: str) -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return text in shown

    reader = threading.Thread(target=lambda: codes.append(logs(there, "RANK=1", "FOLLOW=1")), daemon=True)
    reader.start()
    until(lambda: came("no end"))
    for text in ("; now it has\n", "step 3 ☃\n"):
        with there.rank_log(1).open("ab") as stream:
            stream.write(text.encode())
        until(lambda text=text: came(text))  # type: ignore[misc]
    assert not codes, "it goes on"
    launcher.kill()
    launcher.wait(timeout=SECONDS)
    reader.join(SECONDS)
    came("")
    assert codes == [0] and shown == "step 1 é☃\rstep 2\nno end; now it has\nstep 3 ☃\n"


def test_nothing_follows_a_log_for_nobody(there: RunFolder, launcher: subprocess.Popen[bytes]) -> None:
    inventory = read_inventory(there.path.parents[2] / "home.yaml")
    old = inventory.hosts[1]
    with subprocess.Popen(python_of(old, inventory), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request_of(old, "tail", run="one", rank=1, follow=True, also=[]).encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"text": "step 1 é☃\rstep 2\nno end"}
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=SECONDS) == 0 and launcher.poll() is None
