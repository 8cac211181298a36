"""Each example's one command, as its README says it, shortened to a few steps of a tiny model (the quickstart has its
own test).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment, metrics, run_program

pytestmark = pytest.mark.broad

EXAMPLES = {
    "02_your_jsonl": ("single", 8),
    "03_two_processes": ("ddp", 8),
    "04_zero": ("zero2", 8),
    "05_fsdp2": ("fsdp2", 8),
    "07_continued_pretraining": ("single", 4),
    "08_from_scratch": ("single", 16),
}
"""Each with its strategy and the rows of a step."""


def command_of(example: str) -> list[str]:
    text = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)\n```", text, re.S)
    assert block
    return shlex.split(block.group(1))


LONG = ("03_two_processes", "05_fsdp2", "07_continued_pretraining", "08_from_scratch")
"""The same commands are in test_training_equivalence.py and test_pretraining.py."""


@pytest.mark.parametrize(
    "example", [pytest.param(example, marks=pytest.mark.long if example in LONG else ()) for example in EXAMPLES]
)
def test_an_example_runs_as_its_readme_says(example: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    make, *words = command_of(example)
    assert make == "make"
    short = ["TRAIN_MAX_STEPS=2", *([f"MODEL_NAME={tiny}"] if example != "08_from_scratch" else ["MODEL_LAYERS=1"])]
    done = run_program([*words, *short], environment(cache, tmp_path))
    assert done.code == 0, done.out + done.err
    (run,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(metrics(run)) == 2 and (run / "model" / "stamp.json").is_file()
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["strategy"], plan["global_batch_size"]) == EXAMPLES[example]


@pytest.mark.long
def test_an_example_can_be_stopped_resumed_asked_and_merged(tiny: Path, cache: Path, tmp_path: Path) -> None:
    if not (ROOT / ".venv" / ".runtime").exists():
        pytest.skip("the script calls make, and `make install` was not run in this checkout")
    env = environment(cache, tmp_path, {"RUN_NAME": "stopped"})
    done = subprocess.run(
        [str(ROOT / "examples" / "06_resume_and_infer" / "run.sh"), f"MODEL_NAME={tiny}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in (tmp_path / "stopped" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 3 and all("answer" in answer for answer in answers)
    assert (tmp_path / "stopped" / "merged" / "model.safetensors").is_file()
    steps = [row["step"] for row in metrics(tmp_path / "stopped")]
    assert steps == sorted(set(steps)) and os.path.lexists(tmp_path / "stopped" / "checkpoints" / "last")
