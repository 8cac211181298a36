"""Shared code of the benchmarks: arguments, rows and configurations of real runs, measured processes, and pages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.data.builtin import read_builtin
from sft_play.files import write_json, write_text
from sft_play.plan.hardware import cpu_threads
from sft_play.runs.folder import RunFolder

MODEL = os.environ.get("BENCH_MODEL") or "HuggingFaceTB/SmolLM2-135M-Instruct"
"""`BENCH_MODEL=FOLDER` uses another model, such as a tiny one to show that a benchmark still runs."""
TIMEOUT_SECONDS = 1800
MARK = "<!-- measured -->"


def options_of(arguments: Sequence[str], **defaults: int) -> tuple[dict[str, int], str | None]:
    """Return the numbers typed as `NAME=value`, or their defaults, and the file to `write`."""
    typed = dict(argument.partition("=")[::2] for argument in arguments)
    document = typed.pop("write", None)
    unknown = [name for name, value in typed.items() if name not in defaults or not value.isdigit()]
    if unknown:
        print(
            f"unknown arguments: {', '.join(unknown)}; expected {', '.join(defaults)} (numbers) and write",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return defaults | {name: int(value) for name, value in typed.items()}, document


def write_rows(path: Path, count: int, split: str = "train") -> str:
    """Write functions of the standard library with their docstrings, and return the path."""
    rows = [row for _, row in zip(range(count), read_builtin("docstrings", split), strict=False)]
    write_text(path, "".join(json.dumps(dict(row)) + "\n" for _, row in rows))
    return str(path)


def train(folder: Path, name: str, settings: Mapping[str, Any], command: str = "train", *words: str) -> RunFolder:
    """Train through `python -m sft_play COMMAND`, as a user does, with all its logging; return the run in `folder`."""
    run, config = RunFolder(folder / "runs" / name), folder / f"{name}.yaml"
    write_json(config, settings)  # JSON is YAML
    arguments = [sys.executable, "-m", "sft_play", command, f"CONFIG={config}", f"RUN_NAME={name}", *words]
    run_measured(arguments, {"RUNS_DIR": str(run.path.parent)})
    return run


def rows_of(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a kind in a run's `metrics.jsonl`."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]


def run_measured(arguments: Sequence[str], extra: Mapping[str, str]) -> int:
    """Run a command to its end and return the peak resident memory (bytes) of its largest process. Raise on failure."""
    environment = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **extra}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"failed with code {process.returncode}: {' '.join(arguments)}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def date_and_machine() -> str:
    """Describe what the figures depend on: date, processors, GPU, versions."""
    import torch
    import transformers

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, fp32"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{time.strftime('%Y-%m-%d')}, {cpu_threads()} cores ({platform.machine()}), {device}, {versions}"


def introduction(name: str) -> str:
    """Return the manually written part of a page of `docs/`, up to and including its mark."""
    before, mark, _ = (Path(__file__).parents[1] / "docs" / name).read_text(encoding="utf-8").partition(MARK)
    assert mark, f"docs/{name} has lost its line `{MARK}`, after which figures are written"
    return before + mark


def publish(text: str, document: str | None) -> None:
    """Print the measurements, and write them after the mark of `document`, if any."""
    print(text)
    if document:
        before = introduction(Path(document).name) if Path(document).is_file() else MARK
        write_text(Path(document), f"{before}\n\n{text}\n")
