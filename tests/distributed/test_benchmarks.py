"""Each benchmark and script runs at its smallest size; the figures mean nothing then."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.acceptance_model import make
from benchmarks.acceptance_steps import TINY_SHAPE
from scripts.render_pictures import draw
from sft_play.model import convert
from tests.conftest import environment
from tests.documents import ROOT

pytestmark = pytest.mark.broad

LONG = pytest.mark.long
BENCHMARKS = {
    "preparation": (("rows=20",), "rows a second"),
    "evaluation": (("rows=4", "tokens=4"), "answers/s"),
    "saving": (("steps=2", "every=1"), "pause in steps"),
    "memory": (("cases=1",), "growth planned, GiB"),
    "watching": (("steps=8", "block=1"), '"ratio"'),
    "local_steps": (("steps=2", "rows=2", "held=2", "ways=2"), "held-out loss at the end"),
    "launchers": (("machines=3", "beating=1"), '"meet again and share, s"'),
    "training": (("pairs=1", "steps=1"), "transformers `Trainer`"),
}
"""Benchmark -> what makes it small, and what its table holds."""
NO_BENCHMARK = {"harness", "acceptance", "acceptance_model", "acceptance_steps"}
"""What benchmarks share, and what `tests/contract/test_acceptance.py` runs."""
SCRIPTS = {
    "check_tree.py": ((), "modules"),
    "measure_chunked_loss.py": (("1", "64"), "| trained | 64 |"),
    "render_launch_files.py": ((), ""),
    "render_presets.py": ((), ""),
    "render_reference.py": ((), ""),
}
"""Script -> its words, and what it prints."""
NO_PLAIN_SCRIPT = {"render_models.py", "render_pictures.py"}
"""These take names: of families, which need minutes, and of pictures."""


def run(words: Sequence[str], env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr
    return done


def copied(folder: Path) -> Path:
    """Return a copy of what scripts read and write."""
    for name in (
        "accelerate_configs",
        "configs",
        "deepspeed",
        "docs",
        "scripts",
        "sft_play",
        "tests",
        "examples",
        "benchmarks",
    ):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    return folder


def test_every_benchmark_and_script_is_tested() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} == BENCHMARKS.keys() | NO_BENCHMARK
    assert {path.name for path in (ROOT / "scripts").glob("*.py")} == SCRIPTS.keys() | NO_PLAIN_SCRIPT


@pytest.fixture(scope="module")
def small(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a tiny model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_PLAY_CACHE", str(cache))
        make(folder, convert.embedded_folder(), TINY_SHAPE | {"vocabulary": 49152}, batch=1)
    return folder / "m8b"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LONG if n in ("training", "local_steps") else ()) for n in BENCHMARKS]
)
def test_a_benchmark_runs(name: str, cache: Path, small: Path, tmp_path: Path) -> None:
    """It ends with 1 if a bound does not hold."""
    if name == "training":
        pytest.importorskip("trl")
    words, expected = BENCHMARKS[name]
    env = environment(
        cache, tmp_path / "runs", {"BENCH_MODEL": str(small), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    )
    (tmp_path / "runs").mkdir()
    assert expected in run(["-m", f"benchmarks.{name}", *words], env).stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_what_it_renders_is_there_already(name: str, cache: Path, tmp_path: Path) -> None:
    words, printed = SCRIPTS[name]
    tree = copied(tmp_path / "tree")
    done = run([f"scripts/{name}", *words], environment(cache, tmp_path / "runs", {"PYTHONPATH": str(tree)}), tree)
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr
    if re.match("render", name):
        changed = [
            path.relative_to(tree)
            for path in tree.rglob("*.[mjy]*")
            if path.read_bytes() != (ROOT / path.relative_to(tree)).read_bytes()
        ]
        assert not changed


def test_a_picture_is_drawn_of_what_a_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    draw("plan", f"{sys.executable} -m sft_play plan CONFIG={ROOT / 'configs' / 'run_bnb.yaml'} HARDWARE=RTX4090 WHY=0")
    assert "RTX4090" in (tmp_path / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8")


@LONG
def test_a_familys_row_in_the_table_is_up_to_date(cache: Path, tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    run(
        ["-m", "scripts.render_models", "llama"], environment(cache, tmp_path / "runs", {"PYTHONPATH": str(tree)}), tree
    )
    assert (tree / "docs" / "models.md").read_bytes() == (ROOT / "docs" / "models.md").read_bytes()
