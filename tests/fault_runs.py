"""Launches that are disturbed from outside: a tiny model, the processes of a launch, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.launch.liveness import MARK
from tests.conftest import ROOT, metrics
from tests.waiting import until

SECONDS = 240


def tiny_config(folder: Path, model: Path, *lines: str, rows: int = 16) -> Path:
    """Writes a configuration of a run whose steps take some hundredths of a second; `lines` are further keys of `train`."""
    data, config = folder / "rows.jsonl", folder / "demo.yaml"
    turns = [{"prompt": f"say {number}", "completion": f"I say {number} now"} for number in range(rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in turns))
    config.write_text(
        f"model:\n  name: {model}\n  max_seq_len: 64\ntuning:\n  mode: lora\ndata:\n  train_path: {data}\n"
        "train:\n  global_batch_size: 4\n  max_steps: 60\n  save_steps: 5\n  packing: off\n"
        + "".join(f"  {line}\n" for line in lines)
    )
    return config


def workers_of(launcher: int) -> dict[int, psutil.Process]:
    """Returns rank -> process of the workers of a launcher: the children of `accelerate launch`."""
    found, agents = {}, {agent.pid for agent in family(launcher, "accelerate.commands.launch")}
    for child in family(launcher, "sft_play.train"):
        with contextlib.suppress(psutil.Error):
            if child.ppid() in agents:
                found[int(child.environ().get("RANK", "0"))] = child
    return found


def family(launcher: int, *words: str) -> list[psutil.Process]:
    """Returns the living descendants of a launcher with one of `words` on their command line; without any, all of them."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and (not words or any(word in one.cmdline() for word in words)):
                    found.append(one)
    return found


@dataclass
class Started:
    """A launch, and its processes; as a context it is killed where a test has failed."""

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
        self.process.wait(timeout=30)
        for process in everybody:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits for something while the launch runs."""
        until(happened, process=self.process, seconds=SECONDS, pause=0.002, said=self.output.read_text)

    def wait_for_step(self, step: int) -> None:
        """Waits until the metrics hold a step."""
        file = self.run / "metrics.jsonl"
        self.wait_for(lambda: file.is_file() and any(row["step"] >= step for row in _whole(self.run)))

    def family(self, *words: str) -> list[psutil.Process]:
        return family(self.process.pid, *words)

    def workers(self) -> dict[int, psutil.Process]:
        """Returns rank -> worker, and remembers the launch's mark."""
        found = workers_of(self.process.pid)
        for worker in found.values():
            self.mark = worker.environ()[MARK]
        return found

    def agent(self) -> psutil.Process:
        """Returns `accelerate launch`."""
        return self.family("accelerate.commands.launch")[0]

    def left(self) -> list[psutil.Process]:
        """Returns the living processes of this launch, wherever they are."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self, *, within: float = SECONDS) -> tuple[int, str]:
        """Waits for the end; returns code and what was said."""
        return self.process.wait(timeout=within), self.output.read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]


def _whole(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(json.JSONDecodeError):  # the last line is being written
        return metrics(run)
    return []


def start(variables: Mapping[str, str], *words: str, name: str) -> Started:
    """Starts a command in the background, in a session of its own, as a terminal would."""
    runs = Path(variables["RUNS_DIR"])
    output = runs.parent / f"{name}-{time.monotonic_ns()}.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "sft_play", *words, f"RUN_NAME={name}"],
            cwd=ROOT, env=dict(variables), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Started(process, runs / name, output)


def learnt(run: Path) -> list[tuple[int, float, float, float]]:
    """Returns step, loss, gradient norm and learning rate of every step."""
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in metrics(run)]
