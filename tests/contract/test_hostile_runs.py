"""Every command refuses hostile parts of a run in one line, touches nothing outside it, and still shows other runs."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sft_play.__main__ import COMMANDS
from sft_play.errors import CheckpointError
from sft_play.files import append_text, open_own
from sft_play.report.server import application
from sft_play.runs.folder import RunFolder
from sft_play.runs.gate import check_run
from tests.conftest import Done, Program, environment, must_run
from tests.hostile_runs import CONTENTS, FILES, FOLDERS, SECRET, make_hostile, parts_of

SECONDS = 10
NAMED = {
    "inspect": ["OUT={out}"],
    "infer": ["PROMPT=a"],
    "push": ["REPO=a/b"],
    "merge": [],
    "logs": [],
    "serve": [],
    "memory-check": [],
    "profile": [],
    "stop": [],
    "cluster-check": ["CLUSTER={out}"],
    "train-cluster": ["CLUSTER={inventory}"],
    "cluster-status": ["CLUSTER={inventory}"],
    "cluster-logs": ["CLUSTER={inventory}"],
    "cluster-stop": ["CLUSTER={inventory}"],
}
"""What a command needs in addition to `RUN`."""
BY_NAME = {
    "slurm": ["CONFIG={config}", "RUN_NAME=bad"],
    "kubernetes": ["CONFIG={config}", "RUN_NAME=bad"],
    "compare": ["RUNS=bad good"],
}
OF_ALL = {"runs": ["JSON=1"]}
READERS = ("report", "stamp", "config", "compare", "watch", "logs", "card", "profile", "stop", "runs")
"""Commands that show what a run's files say, and start nothing."""


@pytest.fixture(scope="module")
def complete(cache: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a complete run with two checkpoints, an evaluation, a report, and a configuration next to it."""
    folder = tmp_path_factory.mktemp("complete")
    rows, config = folder / "rows.jsonl", folder / "c.yaml"
    rows.write_text("".join(f'{{"prompt": "a{i}", "completion": "b{i}"}}\n' for i in range(24)))
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 64}}\ndata: {{train_path: {rows}, validation: 0.2}}\ntrain: {{max_steps:"
        " 2, save_steps: 1, global_batch_size: 4, predict_with_generate: true, generation_max_new_tokens: 2}\n"
    )
    must_run(["train", f"CONFIG={config}", "RUN_NAME=good"], environment(cache, folder / "runs"))
    return folder / "runs" / "good"


@contextmanager
def watched(outside: Path) -> Iterator[list[str]]:
    """Yield the files outside the run that this process opens, and end what takes longer than `SECONDS`."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and active and isinstance(arguments[0], str | Path) and not arguments[2] & UNFOLLOWED:
            path = Path(arguments[0])
            opened.extend([str(path)] if path.resolve().is_relative_to(outside) else [])

    def late(*_: Any) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    active = True
    sys.addaudithook(hook)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield opened
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        active = False


UNFOLLOWED = 0o400000  # O_NOFOLLOW


def words_of(command: str, tmp_path: Path, complete: Path) -> list[str]:
    arguments = BY_NAME.get(command) or OF_ALL.get(command) or ["RUN=bad", *NAMED.get(command, [])]
    places = {"out": tmp_path / "out", "inventory": tmp_path / "home.yaml", "config": complete.parent.parent / "c.yaml"}
    return [command, *(word.format(**places) for word in arguments)]


def commands() -> list[str]:
    """Return every command that takes a run, or lists them."""
    return [*(name for name, row in COMMANDS.items() if "RUN" in row.options), *BY_NAME, *OF_ALL]


def state_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else "" for path in folder.rglob("*")}


def check(done: Done, outside: Path, before: dict[str, str], opened: list[str], run: Path) -> None:
    assert state_of(outside) == before and not opened, f"{opened}\n{done.err}"
    assert SECRET not in done.out + done.err and "Traceback" not in done.err, done.err
    report = run / "report.html"
    assert not report.is_file() or report.is_symlink() or report.stat().st_nlink > 1 or SECRET not in report.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "link" else pytest.mark.long) for kind in FILES]
)
@pytest.mark.broad
def test_no_command_follows_what_a_stranger_put_into_a_run(
    kind: str, complete: Path, tmp_path: Path, in_process: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same check refuses parts that a command can do without, before anything is read or written."""
    outside, runs = tmp_path / "outside", tmp_path / "runs"
    runs.mkdir()
    shutil.copytree(complete, runs / "good", symlinks=True)
    (tmp_path / "home.yaml").write_text("hosts: [{name: here, address: 127.0.0.1}]\n")
    for part in parts_of(complete):
        if (complete / part).is_dir() and kind not in FOLDERS:
            continue
        shutil.copytree(complete, runs / "bad", symlinks=True)
        make_hostile(runs / "bad", part, kind, outside)
        before = state_of(outside)
        for command in commands():
            with watched(outside) as opened:
                done = in_process(*words_of(command, tmp_path, complete))
            check(done, outside, before, opened, runs / "bad")
            if command in OF_ALL:
                rows = {row["name"]: row for row in done.json}
                assert rows["good"]["state"] == "finished" and rows["bad"]["state"] == "unreadable", rows
                assert "bad" in rows["bad"]["problem"] and "plain files" in rows["bad"]["problem"]
            else:
                assert done.code in (2, 3, 4, 5), f"{command} with {part} as a {kind}: {done}"
                assert done.err.count("error: ") == 1, done.err
        base = "http://127.0.0.1"
        with (
            TestClient(application(None, "127.0.0.1"), base_url=base) as page,
            monkeypatch.context() as patch,
            watched(outside) as opened,
        ):
            patch.setenv("RUNS_DIR", str(runs))
            states = {row["name"]: row["state"] for row in page.get("/api/runs").json()}
            answers = [page.get(path) for path in ("/api/run/bad", "/api/compare?runs=bad,good")]
        assert states == {"good": "finished", "bad": "unreadable"} and not opened
        assert all(answer.status_code == 422 and "plain files" in answer.json()["error"] for answer in answers)
        shutil.rmtree(runs / "bad")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.broad
def test_no_file_of_a_run_ends_a_command_with_a_traceback(
    kind: str, complete: Path, tmp_path: Path, in_process: Program
) -> None:
    """Deeply nested JSON and values of wrong types are omitted if a command can do without them, else refused in one
    line.
    """
    outside, runs = tmp_path / "outside", tmp_path / "runs"
    runs.mkdir()
    shutil.copytree(complete, runs / "good", symlinks=True)
    for part in (file for file in parts_of(complete) if file.endswith((".json", ".jsonl"))):
        shutil.copytree(complete, runs / "bad", symlinks=True)
        make_hostile(runs / "bad", part, kind, outside)
        for command in READERS:
            with watched(outside) as opened:
                done = in_process(*words_of(command, tmp_path, complete))
            check(done, outside, state_of(outside), opened, runs / "bad")
            refused = done.code in (2, 4, 5) and done.err.count("error: ") == 1
            assert done.code == 0 or refused, f"{command} with {kind} {part}: {done}"
            if command == "runs":
                assert {row["name"]: row["state"] for row in done.json}["good"] == "finished"
        shutil.rmtree(runs / "bad")


def test_links_and_pipes_are_refused_when_a_file_is_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for number, make in enumerate(
        (lambda path: path.symlink_to(secret), lambda path: path.hardlink_to(secret), os.mkfifo)
    ):
        path = tmp_path / f"made-{number}"
        make(path)
        with pytest.raises(OSError, match="it is "):
            open_own(path, empty=True)
        with pytest.raises(OSError, match="it is "):
            append_text(path, "x", sync=False)
    assert secret.read_text() == SECRET


def test_a_trackers_own_links_are_accepted(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.path / "wandb" / "run-1").mkdir(parents=True)
    run.config.write_text("{}", encoding="utf-8")
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    assert check_run(run, writes=True) is run
    (run.path / "wandb" / "debug.log").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="is a link to"):
        check_run(run)
