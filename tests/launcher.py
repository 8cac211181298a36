"""Commands started as by a user, with a tiny model, and the processes of a launch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.launch.liveness import MARK
from sft_play.launch.node import AGENT_MODULE, is_worker
from tests.conftest import ROOT, Done, metrics, run_program
from tests.waiting import until

SECONDS = 240


def tiny_config(folder: Path, model: Path, *, rows: int = 16, steps: int = 60, save_steps: int = 5) -> Path:
    """Write a configuration of a run whose steps take some hundredths of a second."""
    data, config = folder / "rows.jsonl", folder / "demo.yaml"
    turns = [{"prompt": f"say {number}", "completion": f"I say {number} now"} for number in range(rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in turns))
    config.write_text(
        f"model:\n  name: {model}\n  max_seq_len: 64\ntuning:\n  mode: lora\ndata:\n  train_path: {data}\n"
        f"train:\n  global_batch_size: 4\n  max_steps: {steps}\n  save_steps: {save_steps}\n  packing: off\n"
    )
    return config


class Launcher:
    """Runs commands in a separate folder with a tiny model and eight rows."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.config = tiny_config(folder, model, rows=8, steps=2, save_steps=1)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ACCELERATE_"))}
        self.environment = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "RUNS_DIR": str(self.runs),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, name: str = "", **environment: str) -> Started:
        return start(self.environment | environment, *words, name=name, cwd=self.folder)

    def __call__(self, *words: str, **environment: str) -> Done:
        return run_program(list(words), self.environment | environment, cwd=self.folder)

    def in_namespace(self, option: str, script: str, *words: str, **environment: str) -> Done:
        """Run the program as the arguments of a shell script in its own namespace, by an option of `unshare`."""
        command = ["unshare", option, "sh", "-c", script, "sh", sys.executable, "-m", "sft_play", *words]
        return self.run_command(command, self.environment | environment)

    def run_command(self, command: Sequence[str], environment: Mapping[str, str]) -> Done:
        """Run any program in this folder, with this environment and no other."""
        done = subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def events(self, name: str) -> list[dict[str, Any]]:
        return events(self.runs / name)


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def workers_of(launcher: int) -> dict[int, psutil.Process]:
    """Return rank -> process of the workers below a launcher or `accelerate launch`, without their forks."""
    workers, agents = {}, {launcher, *(agent.pid for agent in family(launcher, AGENT_MODULE))}
    for child in family(launcher):
        with contextlib.suppress(psutil.Error):
            if child.ppid() in agents and is_worker(child.cmdline()):
                workers[int(child.environ().get("RANK", "0"))] = child
    return workers


def family(launcher: int, *words: str) -> list[psutil.Process]:
    """Return the living descendants of a launcher with one of `words` on their command line; without any, all of
    them.
    """
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (
                    not words or any(word in process.cmdline() for word in words)
                ):
                    processes.append(process)
    return processes


@dataclass
class Started:
    """A background command and its processes; as a context manager it kills them after a failed test."""

    process: subprocess.Popen[bytes]
    run: Path
    output: Path
    """What it says, on both streams."""
    mark: str = ""

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        everybody = [*self.family(), *(self.left() if self.mark else [])]
        self.process.kill()
        self.process.wait(timeout=240)
        for process in everybody:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait for something while the launch runs."""
        until(happened, process=self.process, seconds=SECONDS, pause=0.002, explanation=self.output.read_text)

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics hold a step."""
        file = self.run / "metrics.jsonl"
        self.wait_for(lambda: file.is_file() and any(row["step"] >= step for row in _whole(self.run)))

    def family(self, *words: str) -> list[psutil.Process]:
        return family(self.process.pid, *words)

    def workers(self) -> dict[int, psutil.Process]:
        """Return rank -> worker, and remember the launch's mark."""
        workers = workers_of(self.process.pid)
        for worker in workers.values():
            self.mark = worker.environ()[MARK]
        return workers

    def agent(self) -> psutil.Process:
        """Return `accelerate launch`."""
        return self.family(AGENT_MODULE)[0]

    def left(self) -> list[psutil.Process]:
        """Return the living processes of this launch, wherever they are."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def end(self, *, within: float = SECONDS) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        return self.process.wait(timeout=within), self.output.read_text()

    def lost(self, *parts: str) -> str:
        """Wait for the end of a run that lost a rank, assert that it reports so and leaves no process, and return its
        output.
        """
        code, error = self.end(within=240)
        assert code == 75 and all(words in error for words in parts), error
        assert self.left() == []
        return error

    def events(self) -> list[dict[str, Any]]:
        return events(self.run)


def _whole(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(json.JSONDecodeError):  # the last line is being written
        return metrics(run)
    return []


def start(variables: Mapping[str, str], *words: str, name: str = "", cwd: Path = ROOT) -> Started:
    """Start a command in the background in a new session, as a terminal does; `name` is that of a new run."""
    runs = Path(variables["RUNS_DIR"])
    output = runs.parent / f"said-{time.monotonic_ns()}.txt"
    command = [sys.executable, "-m", "sft_play", *words, *([f"RUN_NAME={name}"] if name else [])]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, env=dict(variables), cwd=cwd, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Started(process, runs / name, output)


def can_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    test = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return subprocess.run(test, capture_output=True, timeout=10, check=False).returncode == 0
