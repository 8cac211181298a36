"""`make accept-gpu`: its steps run on a CPU with small models, keep what they have when they end, and its page says
what is unverified.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.acceptance import main, page
from benchmarks.acceptance_model import make
from benchmarks.acceptance_steps import TINY_SHAPE
from sft_play.files import read_json
from tests.conftest import ROOT, Done, called, environment, on_machine
from tests.nvml_double import emulated
from tests.waiting import until


@pytest.fixture
def accept(cache: Path, tmp_path: Path):
    def run(*words: str) -> Done:
        places = [f"FOLDER={tmp_path / 'work'}", f"WRITE={tmp_path / 'page.md'}"]
        return called(
            lambda: main([*words, *places]), environment(cache, tmp_path / "runs", {"CUDA_VISIBLE_DEVICES": ""})
        )

    return run


def test_without_a_gpu_acceptance_is_refused_and_changes_nothing(accept, tmp_path: Path) -> None:
    done = accept()
    assert (done.code, done.out) == (3, "")
    assert "`make accept-gpu` needs an NVIDIA GPU, and no NVIDIA driver answers on this machine" in done.err
    assert not list(tmp_path.iterdir())


def test_a_smaller_card_skips_what_does_not_fit_it(cache: Path, tmp_path: Path) -> None:
    words = ["STEPS=10,15", f"FOLDER={tmp_path}", f"WRITE={tmp_path / 'page.md'}", "COMMIT=abc"]
    with on_machine(environment(cache, tmp_path, emulated(tmp_path, "rtx4090", torch=True))):
        assert main(words) == 0
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "NVIDIA GeForce RTX 4090, 24.0 GiB, driver 580.65.06, " in text
    assert "skipped: needs a card of 70 GiB (0 s, " in text and ", commit abc)" in text


@pytest.mark.slow
@pytest.mark.broad
def test_a_failed_step_is_reported_and_a_later_call_completes_the_page(accept, tiny: Path, tmp_path: Path) -> None:
    work, written = tmp_path / "work", tmp_path / "page.md"
    done = accept("STEPS=11", f"SMALL={tiny}", "SECONDS=200")
    assert done.code == 1 and "8b.yaml" in written.read_text(encoding="utf-8"), "no step has made the model yet"
    make(work, tiny, TINY_SHAPE, batch=4)
    assert accept("STEPS=10", f"SMALL={tiny}").code == 0
    results = json.loads((work / "results.json").read_text(encoding="utf-8"))
    assert {number: step["state"] for number, step in results["steps"].items()} == {"10": "holds", "11": "failed"}
    text = written.read_text(encoding="utf-8")
    assert "| 8B full: tokens/s | " in text and "| 8B full: most GiB allocated | " in text
    assert f" Small model: {tiny.name}." in text
    assert "| **10. " in text and "; 9 8B" in text and "; 10 8B" not in text and "Unverified" not in text


@pytest.mark.slow
@pytest.mark.broad
def test_steps_of_the_small_model_run_at_once(accept, tiny: Path, tmp_path: Path) -> None:
    assert accept("STEPS=1,5,12", f"SMALL={tiny}", "SECONDS=400", "AT_ONCE=1").code in (0, 1)
    results = json.loads((tmp_path / "work" / "results.json").read_text(encoding="utf-8"))
    assert results["steps"].keys() == {"1", "5", "12"}
    assert (tmp_path / "work" / "5" / "runs" / "full").is_dir() and (tmp_path / "work" / "m8b").is_dir()
    assert len(results["steps"]["5"]["rows"]) == 9, "two rows of each training, but one of fp16, which a CPU refuses"


@pytest.mark.slow
@pytest.mark.broad
def test_a_stopped_call_stops_its_trainings_and_keeps_its_rows(cache: Path, tiny: Path, tmp_path: Path) -> None:
    places = [f"FOLDER={tmp_path / 'work'}", f"WRITE={tmp_path / 'page.md'}", f"SMALL={tiny}", "STEPS=0,4,5"]
    env, results = (
        environment(cache, tmp_path / "runs", {"CUDA_VISIBLE_DEVICES": ""}),
        tmp_path / "work" / "results.json",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.acceptance", *places], env=env, stderr=subprocess.PIPE, text=True
    ) as call:

        def trains() -> list[psutil.Process]:
            ours = [(process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"])]
            return [process for process, words in ours if "sft_play.train" in words and str(tmp_path) in words]

        until(lambda: results.is_file() and trains(), process=call, seconds=300)
        family = [*trains(), *psutil.Process(call.pid).children()]
        call.terminate()
        _, output = call.communicate(timeout=240)
    assert call.returncode == 143, output
    assert not psutil.wait_procs(family, timeout=240)[1]
    steps = json.loads(results.read_text(encoding="utf-8"))["steps"]
    assert steps["0"]["rows"] and "5" not in steps


def test_a_step_without_time_is_not_started_and_earlier_measurements_stay(accept, tiny: Path, tmp_path: Path) -> None:
    done = accept("STEPS=9,10", f"SMALL={tiny}", "SECONDS=1")
    assert done.code == 1 and "10  8B: every weight: not started, no time is left" in done.err
    assert not (tmp_path / "page.md").exists()
    assert accept("SECONDS=soon").code == 2


@pytest.mark.long
@pytest.mark.slow
def test_steps_run_on_a_cpu(accept, tiny: Path, tmp_path: Path) -> None:
    """Those that need neither a GPU nor another package; their bounds are those of a card."""
    done = accept("STEPS=1,4,6,10,13,15", f"SMALL={tiny}", "SECONDS=3000")
    results = json.loads((tmp_path / "work" / "results.json").read_text(encoding="utf-8"))
    steps = results["steps"].values()
    assert not [step["reason"] for step in steps if step["state"] == "failed"], done.err
    assert not [row for step in steps for row in step["rows"] if row["bound"] == "trains"], done.err


def test_the_published_page_is_what_the_command_writes() -> None:
    docs = ROOT / "docs"
    assert (docs / "benchmarks-gpu.md").read_text(encoding="utf-8") == page(read_json(docs / "benchmarks-gpu.json"))
    assert "Unverified" in page({})
