"""A folder with a separate model, data and runs, and the program called inside it: shared by tests of a trained run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import Done, call_program, environment

WORDS = ["list", "tuple", "dict", "set", "string", "number", "file", "module", "class", "function", "loop", "test"]


class Place:
    """A folder, its configuration, and commands on its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "demo.yaml"
        self.environment = environment(folder / "cache", folder / "runs", {"OMP_NUM_THREADS": "1"})

    def command(self, *words: str) -> list[str]:
        """Return the command line that a shell would start."""
        return [sys.executable, "-m", "sft_play", *words]

    def run(self, *words: str, stdin: str = "", timeout: int = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in a separate process."""
        return subprocess.run(
            self.command(*words),
            input=stdin,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def train(self, name: str, *words: str, command: str = "train") -> Path:
        """Train a run of the configuration to its end, and return its folder."""
        done = self.run(command, f"CONFIG={self.config}", f"RUN_NAME={name}", *words)
        assert done.returncode == 0, done.stderr
        return self.folder / "runs" / name

    def call(self, *words: str) -> Done:
        """Run a command in this process, for refusals, which need no separate one."""
        return call_program(list(words), self.environment)

    def scores(self, *words: str) -> dict[str, Any]:
        """Return what `eval JSON=1` prints."""
        done = self.run("eval", *words, "JSON=1")
        assert done.returncode == 0, done.stderr
        scores: dict[str, Any] = json.loads(done.stdout)
        return scores

    def folder_of(self, run: str, step: int) -> Path:
        """Return the folder of a run's evaluation."""
        return self.folder / "runs" / run / "eval" / f"step-{step:06d}"


def question_rows(start: int, count: int, *, longest: int) -> str:
    """Return questions of 1 to `longest` words with their answers, as lines of JSON."""
    rows = [
        {
            "prompt": f"What is {' '.join(WORDS[: i % longest + 1])} {i}?",
            "completion": f"The {WORDS[i % 12]} is a {WORDS[i % 7]}.",
        }
        for i in range(start, start + count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)
