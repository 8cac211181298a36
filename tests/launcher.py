"""Commands in a folder of their own, started as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240


class Launcher:
    """Runs commands in a folder of its own with a tiny model and eight rows."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        rows = [
            {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"I say {i} now"}]}
            for i in range(8)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = folder / "demo.yaml"
        self.config.write_text(
            f"model:\n  name: {model}\n  max_seq_len: 64\ntuning:\n  mode: lora\ndata:\n  train_path: {folder / 'rows.jsonl'}\n"
            "train:\n  global_batch_size: 4\n  max_steps: 2\n  save_steps: 1\n"
        )
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ACCELERATE_"))}
        self.environment = {
            **kept, "PYTHONPATH": str(ROOT), "RUNS_DIR": str(self.runs), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"
        }  # fmt: skip

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sft_play", *arguments]
        return subprocess.Popen(
            command,
            env=self.environment | environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        output, error = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(arguments, process.returncode, output, error)

    def events(self, name: str, runs: Path | None = None) -> list[dict[str, Any]]:
        text = ((runs or self.runs) / name / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def wait_for(self, path: Path, process: subprocess.Popen[str]) -> None:
        until(path.exists, process=process, seconds=SECONDS)

    def wait_for_steps(self, run: Path, steps: int, process: subprocess.Popen[str]) -> None:
        """Waits until the metrics hold this many lines: a rank that has not ended a step yet has nothing to save when it is asked to stop."""
        file = run / "metrics.jsonl"
        until(lambda: file.exists() and file.read_text().count("\n") >= steps, process=process, seconds=SECONDS)


def can_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    test = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return subprocess.run(test, capture_output=True, timeout=10, check=False).returncode == 0
