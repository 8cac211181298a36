"""Launches that are disturbed from outside: a tiny model, the processes of a launch, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
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


@dataclass
class Started:
    """A launch, and its processes; as a context it is killed where a test has failed."""

    process: subprocess.Popen[str]
    run: Path
    mark: str = ""

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        assert self.process.stderr is not None
        self.process.stderr.close()
        for process in self.left() if self.mark else []:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits for something while the launch runs."""
        until(happened, process=self.process, seconds=SECONDS)

    def wait_for_step(self, step: int) -> None:
        """Waits until the metrics hold a step."""
        file = self.run / "metrics.jsonl"
        self.wait_for(lambda: file.is_file() and any(row["step"] >= step for row in _whole(self.run)))

    def workers(self) -> dict[int, psutil.Process]:
        """Returns rank -> worker, and remembers the launch's mark."""
        found = {}
        for child in [child for agent in self._agents() for child in agent.children()]:
            with contextlib.suppress(psutil.Error):
                if "sft_play.train" in child.cmdline():
                    found[int(child.environ().get("RANK", "0"))] = child
                    self.mark = child.environ()[MARK]
        return found

    def agent(self) -> psutil.Process:
        """Returns `accelerate launch`."""
        return self._agents()[0]

    def _agents(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "accelerate.commands.launch" in child.cmdline():
                    found.append(child)
        return found

    def left(self) -> list[psutil.Process]:
        """Returns the living processes of this launch, wherever they are."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self, *, within: float = SECONDS) -> tuple[int, str]:
        """Waits for the end; returns code and stderr."""
        _, error = self.process.communicate(timeout=within)
        return self.process.returncode, error

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]


def _whole(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(json.JSONDecodeError):  # the last line is being written
        return metrics(run)
    return []


def start(variables: Mapping[str, str], *words: str, name: str) -> Started:
    """Starts a command in the background."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", *words, f"RUN_NAME={name}"],
        cwd=ROOT, env=dict(variables), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Started(process, Path(variables["RUNS_DIR"]) / name)


def learnt(run: Path) -> list[tuple[int, float, float, float]]:
    """Returns step, loss, gradient norm and learning rate of every step."""
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in metrics(run)]
