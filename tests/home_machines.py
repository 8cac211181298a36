"""Machines of namespaces as a home has them: each with its own files and its sshd; commands are typed on the first."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from sft_play.runs.folder import RunFolder
from tests.conftest import metrics
from tests.lan import Lan

SECONDS = 240


class Home:
    """Machines with a project folder, runs, cache and models of their own; commands are typed on the first."""

    def __init__(self, net: Lan, folder: Path, model: Path, data: Path) -> None:
        self.net, self.folder = net, folder
        shutil.copytree(model, data / "tiny")
        rows = [{"prompt": f"say {i}", "completion": "I say " + "so " * (i % 7) + f"{i} now"} for i in range(24)]
        (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        seen = folder / "lan" / "models"
        self.config = folder / "demo.yaml"
        self.config.write_text(
            f"model: {{name: {seen / 'tiny'}, max_seq_len: 64}}\ntuning: {{mode: lora}}\ndata: {{train_path: {seen / 'rows.jsonl'}}}\n"
            "train: {global_batch_size: 6, max_steps: 4, save_steps: 2, logging_steps: 1, lr_scheduler_type: constant}\n"
        )
        self.inventory = net.inventory(folder / "home.yaml", defaults={"folder": str(folder / "lan" / "project")})
        self.started: list[tuple[subprocess.Popen[str], Path]] = []

    def start(self, *words: str, terminal: bool = False, **env: str) -> subprocess.Popen[str]:
        """Types a command on the first machine, on a `terminal` or not; what it prints can be read by `said`."""
        path = self.folder / f"said{len(self.started)}"
        with path.open("w") as said:
            command = [self.net.python, "-m", "sft_play", *words, f"CLUSTER={self.inventory}"]
            command = ["script", "-qefc", shlex.join(map(str, command)), "/dev/null"] if terminal else command
            process = self.net.popen(0, command, env=env, stdout=said, stderr=subprocess.STDOUT)
        self.started.append((process, path))
        return process

    def said(self) -> str:
        return self.started[-1][1].read_text()

    def end(self, seconds: float = SECONDS) -> int:
        """Waits for what was started last, and returns its exit code."""
        try:
            return self.started[-1][0].wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def type(self, *words: str, **env: str) -> tuple[int, str]:
        """Types a command and waits for its end."""
        self.start(*words, **env)
        return self.end(), self.said()

    def run(self, name: str, k: int = 0) -> RunFolder:
        """A run as machine `k` has it."""
        return RunFolder(self.net.hosts[k].private[self.folder / "lan" / "runs"] / name)

    def until(self, true: Callable[[], bool]) -> None:
        """Waits for something that what was started last is to bring about."""
        deadline = time.monotonic() + SECONDS
        while not true():
            assert self.started[-1][0].poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def until_step(self, name: str, step: int) -> None:
        """Waits until that many optimizer steps have been logged."""
        path = self.run(name).metrics
        self.until(lambda: path.is_file() and any(f'"step": {step},' in line for line in path.read_text().splitlines()))

    def working(self, k: int) -> list[str]:
        """The command lines of all our processes on machine `k`."""
        found = []
        for pid in self.net.pids(k):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if "sft_play" in words or "types.ModuleType" in words:  # one that has ended has no words
                    found.append(words[:200])
            except OSError:
                continue
        return found

    def all_free(self, *machines: int, seconds: float = 5) -> None:
        """Waits until nothing of ours runs on these machines."""
        deadline = time.monotonic() + seconds
        while busy := [words for k in machines for words in self.working(k)]:
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)

    def alone(self, *words: str) -> list[float]:
        """The losses of one process that trains the same."""
        done = self.net.run(
            0, [self.net.python, "-m", "sft_play", "train", f"CONFIG={self.config}", "RUN_NAME=alone", *words], timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [row["loss"] for row in metrics(self.run("alone").path)]
