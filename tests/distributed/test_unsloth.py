"""`tuning.backend: unsloth`, typed in the main environment, is carried out in that of `make install-unsloth`.

On a CPU Unsloth computes with transformers and PEFT: environment, arguments, saving and resuming are proven here, and
no kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import metrics
from tests.families import build_family
from tests.launcher import Launcher
from tests.programs import unavailable
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.broad

STEPS = 12
WORDS = ("NUM_GPUS=2", f"TRAIN_MAX_STEPS={STEPS}", "TRAIN_SAVE_STEPS=2", "TRAIN_LOGGING_STEPS=1", "TRAIN_BF16=false")


@pytest.fixture
def launcher(tmp_path: Path, tiny: Path) -> Launcher:
    if not Path(f"{sys.prefix}-unsloth", "bin", "python").is_file():
        unavailable("`make install-unsloth` was not typed")
    launcher_of_tiny = Launcher(tmp_path, tiny)
    launcher_of_tiny.environment["CUDA_VISIBLE_DEVICES"] = ""
    return launcher_of_tiny


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in metrics(run)]


def test_unsloth_trains_on_two_ranks_and_continues_after_a_kill(launcher: Launcher) -> None:
    words = (f"CONFIG={launcher.config}", *WORDS)
    assert (plain := launcher("train-distributed", *words, "RUN_NAME=plain", "TRAIN_PACKING=off")).code == 0, plain.err
    unsloth, run = ("TUNING_BACKEND=unsloth",), launcher.runs / "killed"
    with launcher.start("train-distributed", *words, *unsloth, name="killed") as started:
        started.wait_for_step(5)
        started.workers()
    resumed = launcher("resume", "RUN=killed")
    assert resumed.code == 0, resumed.err
    assert losses(run) == pytest.approx(losses(launcher.runs / "plain"), abs=5e-6) and len(losses(run)) == STEPS

    stamp = json.loads(launcher("stamp", "RUN=killed", "JSON=1").out)
    assert "unsloth" in json.dumps(stamp) and "5.17.0" in json.dumps(stamp)
    for command, arguments in (
        ("merge", ("OUT=merged",)),
        ("infer", ("PROMPT=say 1",)),
        ("eval", (f"DATA={launcher.folder / 'rows.jsonl'}", "EVAL_SAMPLES=2")),
    ):
        done = launcher(command, "RUN=killed", *arguments)
        assert done.code == 0 and "versions" not in done.err, (command, done.err)
    assert list((launcher.folder / "merged").glob("*.safetensors"))
    other = launcher("resume", "RUN=plain", "TUNING_BACKEND=unsloth")
    assert other.code != 0 and "backend" in other.err, other.err


def test_either_backend_continues_adapters_of_unsloth(launcher: Launcher, tmp_path: Path) -> None:
    """Bloom's layers have other names than Llama's."""
    base = build_family(tmp_path / "bloom", "bloom")
    words = (f"CONFIG={launcher.config}", f"MODEL_NAME={base}", "TRAIN_LOGGING_STEPS=1", "TRAIN_BF16=false")
    unsloth, continued = "TUNING_BACKEND=unsloth", "MODEL_ADAPTER=first"
    runs = {"first": (unsloth,), "ours": (continued,), "theirs": (unsloth, continued)}
    for name, changes in runs.items():
        done = launcher("train", *words, *changes, f"RUN_NAME={name}")
        assert done.code == 0, done.err
    first, ours, theirs = (losses(launcher.runs / name) for name in runs)
    assert theirs == pytest.approx(ours, abs=5e-6) and theirs != pytest.approx(first, abs=5e-6)


def test_a_token_without_an_embedding_is_named(launcher: Launcher, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(build_tiny_llama(tmp_path / "short"))
    base.resize_token_embeddings(260)
    base.save_pretrained(tmp_path / "short")
    words = (f"CONFIG={launcher.config}", f"MODEL_NAME={tmp_path / 'short'}", "TUNING_BACKEND=unsloth")
    launcher("train", *words).refused(4, "a row contains the token", "the model's embeddings have 260 rows")
