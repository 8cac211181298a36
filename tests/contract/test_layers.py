"""Layers 0 to 2 start without the heavy packages, and a worker without those that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.training_runs import Trial, command, make_run

UNUSED = (
    "bitsandbytes",
    "deepspeed",
    "datasets",
    "pandas",
    "nltk",
    "rouge_score",
    "sacrebleu",
    "tensorflow",
    "trafilatura",
)
"""What a plain worker must not import: seconds of processor time for each rank."""


def test_a_launcher_starts_without_torch() -> None:
    """import-linter's contract covers the imports of layers 0 to 2; only the store of several machines is exempt."""
    code = "import sys, sft_play.__main__, sft_play.launch.commands; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_worker_imports_nothing_that_its_run_does_not_use(tiny: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny, Trial(mode="lora"))
    _, variables = command(run)
    report = tmp_path / "found.json"
    code = (
        "import json, pathlib, sys, sft_play.train\n"
        f"code = sft_play.train.main(['--run', {str(run.path)!r}])\n"
        f"loaded = [m for m in {UNUSED!r} if sys.modules.get(m)]\n"
        f"pathlib.Path({str(report)!r}).write_text(json.dumps([code, loaded]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text()) == [0, []]
    assert (run.model / "adapter_model.safetensors").is_file()
