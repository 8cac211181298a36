"""The container's entry point: every scheduler's variables become our own command line, signals are passed on, 75
becomes 175.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from sft_play.errors import UserError
from sft_play.schedulers.entry import complete_command, require_progress, supervise
from tests.conftest import ROOT

WORDS = ("train-distributed", "CONFIG=/config/config.json", "RUN_NAME=demo")
TWO = (*WORDS, "NUM_GPUS=1", "NUM_NODES=2", "MASTER_PORT=23456")
PYTORCHJOB = {
    "MASTER_ADDR": "demo-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "demo-master-0",
    "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PYTHONUNBUFFERED": "0",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "demo-node-0-0.demo",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
    "JOB_INDEX": "0",
}
JOB = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "demo-0.demo"}


def added(words: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the scheduler's variables add to a command."""
    completed = complete_command(words, environ)
    assert tuple(completed[: len(words)]) == words
    return dict(word.partition("=")[::2] for word in completed[len(words) :])


@pytest.mark.parametrize(
    ("environ", "words", "expected"),
    [
        (PYTORCHJOB, TWO, {"NODE_RANK": "1", "MASTER_ADDR": "demo-master-0"}),
        (
            {**PYTORCHJOB, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4", "PET_NNODES": ""},
            (*WORDS, "NUM_GPUS=4"),
            {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "demo-master-0", "MASTER_PORT": "23456"},
        ),
        (TRAINJOB, TWO, {"NODE_RANK": "1", "MASTER_ADDR": "demo-node-0-0.demo"}),
        (JOB, TWO, {"NODE_RANK": "1", "MASTER_ADDR": "demo-0.demo"}),
        (
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "demo-master-0", "PET_NNODES": "1", "PET_NODE_RANK": "0"},
            WORDS,
            {},
        ),
    ],
)
def test_each_schedulers_variables_become_options(
    environ: dict[str, str], words: tuple[str, ...], expected: dict[str, str]
) -> None:
    assert added(words, environ) == expected | {"LAUNCH_AUTO_RESUME": "true", "ACCELERATE_CONFIG": "none"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "auto", "RANK": "0"}, "`WORLD_SIZE` is `auto`; expected an integer"),
        (
            {"PET_NNODES": "1:3", "PET_NODE_RANK": "0"},
            "`PET_NNODES` is `1:3`; expected an integer\n\nhint: omit `elasticPolicy`",
        ),
        ({"JOB_COMPLETION_INDEX": "first"}, "`JOB_COMPLETION_INDEX` is `first`"),
    ],
)
def test_variables_of_a_pod_that_are_no_numbers_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        complete_command(WORDS, environ)
    assert f"environment: {message}" in caught.value.render()


def test_a_limit_of_restarts_must_be_a_number() -> None:
    with pytest.raises(UserError, match="`SFT_PLAY_MAX_RESTARTS` is `ten`; expected an integer"):
        require_progress(WORDS, {"SFT_PLAY_MAX_RESTARTS": "ten"})


def test_commands_that_do_not_train_are_unchanged() -> None:
    assert complete_command(["plan", "CONFIG=x"], PYTORCHJOB) == ["plan", "CONFIG=x"]
    assert added(("resume", "RUN=demo"), PYTORCHJOB).get("LAUNCH_AUTO_RESUME") is None
    assert added(("train", "CONFIG=x"), {}) == {"ACCELERATE_CONFIG": "none"}, (
        "without RUN_NAME there is nothing to continue"
    )


def test_the_masters_own_localhost_becomes_an_address_that_others_see() -> None:
    environ = {**PYTORCHJOB, "PET_MASTER_ADDR": "localhost", "PET_NODE_RANK": "0", "RANK": "0", "POD_IP": "10.1.2.3"}
    assert added(TWO, environ)["MASTER_ADDR"] == "10.1.2.3"
    assert "MASTER_ADDR" not in added((*TWO, "MASTER_ADDR=127.0.0.1"), environ), "what was typed stays"


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(75)", 75), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_entry_returns_the_programs_exit_code(program: str, code: int) -> None:
    assert supervise([sys.executable, "-c", program]) == code


def test_a_signal_while_it_waits_ends_it_at_once() -> None:
    environ = {**os.environ, **PYTORCHJOB, "PET_MASTER_ADDR": "nobody.invalid"}
    command = [sys.executable, "-m", "sft_play.schedulers.entry", *TWO]
    waiting = subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None and "waiting up to" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGTERM)
    waiting.communicate(timeout=240)
    assert waiting.returncode == 143


def test_a_signal_reaches_the_program() -> None:
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\nprint('ready',"
        " flush=True)\ntime.sleep(60)"
    )
    outer = (
        "import sys\nfrom sft_play.schedulers.entry import supervise\nsys.exit(supervise([sys.executable, '-c',"
        f" {program!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=240)
    assert process.returncode == 75
