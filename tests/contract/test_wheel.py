"""Installed, not cloned (C27): the wheel in an environment and a folder that know nothing of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.load import load_config
from tests.conftest import environment
from tests.documents import ROOT
from tests.launcher import tiny_config

pytestmark = pytest.mark.slow

Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that uses this one's dependencies, and return its programs."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    source = folder / "source"  # setuptools leaves `build/` where it builds
    for name in ("sft_play", "configs", "deepspeed", "examples", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints-unsloth.txt"):
        shutil.copy(ROOT / name, source)
    old = source / "build" / "lib" / "sft_play" / "removed.py"  # of an earlier wheel
    old.parent.mkdir(parents=True)
    old.touch()
    subprocess.run([*words, str(source)], timeout=240, check=True)
    venv.create(folder / "venv")
    python = str(folder / "venv" / "bin" / "python")
    [wheel] = folder.glob("sft_play-*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, timeout=240, check=True)
    assert not any("removed" in name for name in zipfile.ZipFile(wheel).namelist())
    site = folder / "venv" / "lib" / Path(sysconfig.get_path("purelib")).relative_to(Path(sys.prefix) / "lib")
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # not its own `.pth`, by which the clone is found
    return folder / "venv" / "bin"


@pytest.fixture
def run(installed: Path, tmp_path: Path, cache: Path) -> Run:
    """Run a program of the environment in `tmp_path`, without PYTHONPATH; return what it printed."""
    env = environment(cache, tmp_path / "runs", {"PATH": f"{installed}:{os.defpath}"})
    del env["PYTHONPATH"], env["RUNS_DIR"]

    def run(*words: str, code: int = 0, timeout: int = 300) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


def test_help_and_presets_work_without_a_clone(run: Run, tmp_path: Path) -> None:
    assert str(ROOT) not in run("python", "-c", "import sft_play.init as i; print(i.SHIPPED)")
    pins = "from sft_play.config.layers import SHIPPED; print((SHIPPED / 'constraints-unsloth.txt').read_text())"
    assert "unsloth==" in run("python", "-c", pins)
    assert "sft-play COMMAND" in run("sft-play", "--help")
    assert run("sft-play", "--version").startswith("sft-play 0.")
    assert "CONFIG=quickstart" in run("sft-play", "plan", code=2)
    (tmp_path / "my.yaml").write_text("extends: run_bnb\ntrain: {learning_rate: 1e-5}\n")
    shown = run("sft-play", "config", "CONFIG=my.yaml")
    assert "Qwen/Qwen2.5-7B-Instruct" in shown and "shipped/configs/run_bnb.yaml:" in shown
    assert "submit   sbatch" in run("sft-play", "slurm", "CONFIG=my.yaml", "HARDWARE=L40S")
    assert "did you mean `run_bnb`?" in run("sft-play", "config", "CONFIG=run_bnbb", code=2)


def test_init_makes_a_folder_to_work_in(run: Run, tmp_path: Path) -> None:
    run("sft-play", "init")
    copied = {path.name for path in (tmp_path / "configs").glob("*.yaml")}
    assert copied == {path.name for path in (ROOT / "configs").glob("*.yaml")}
    for config in (tmp_path / "examples").glob("*/*.yaml"):
        if "model:" in config.read_text():
            load_config(config)
    (tmp_path / "runs").mkdir()  # a folder with the name of a command
    assert "no runs" in run("make", "runs").lower()
    preset = tmp_path / "configs" / "run_bnb.yaml"
    preset.write_text(preset.read_text() + "\nlaunch: {timeout_seconds: 77}\n")
    (tmp_path / "my.yaml").write_text("extends: run_bnb\n")
    shown = run("make", "config", "CONFIG=my.yaml", "MODEL_NAME=a$b 'c")
    assert "configs/run_bnb.yaml:" in shown and "77" in shown, "the copy counts, which may have been changed"
    assert "a$b 'c" in shown
    assert "takes no PYTHON" in run("make", "plan", "VENV=x", code=2)
    assert "works in a clone only" in run("make", "install", code=2)
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)
    hint = run("make", "config", "CONFIG=my.yaml", "TRAIN_X=1", code=2)
    pages = re.findall(r"docs/[a-z-]+\.md", hint)
    assert pages and all((tmp_path / name).is_file() for name in pages), hint
    assert (tmp_path / "deepspeed" / "zero3_offload.json").is_file(), "the plan's remedies name it"
    assert "did you mean `make plan`" in run("make", "plann", code=2)
    assert "your files are not replaced" in run("sft-play", "init", code=2)


def test_commands_are_printed_as_they_are_typed_here(run: Run, tmp_path: Path) -> None:
    """Without a Makefile: `sft-play NAME`, and the pages that the wheel holds."""
    wrong = run("sft-play", "config", "CONFIG=run_cpu", "TRAIN_X=1", code=2)
    [page] = re.findall(r"`(\S+\.md)`", wrong)
    assert Path(page).is_file(), wrong
    shown = "".join(
        (
            run("sft-play", "stop", "RUN=nobody", code=5),
            run("sft-play", "plan", "CONFIG=run_bnb", "HARDWARE=24GB"),
            run("sft-play", "plan", "CONFIG=run_bnb", "HARDWARE=8GB", "TUNING_MODE=full", code=3),
            run("sft-play", "plan", "CONFIG=run_cpu"),
            run("sft-play", "train", "NUM_GPUS=2", "CONFIG=run_cpu", code=2),
            run("sft-play", "sweep", "CONFIG=run_cpu", code=2),
        )
    )
    assert "sft-play bench" in shown and "sft-play train-distributed" in shown and "to run it: sft-play train" in shown
    assert not re.findall(rf"\bmake (?:{'|'.join(COMMANDS)})\b", shown), shown
    run("sft-play", "init")
    assert "to run it: make train" in run("make", "plan", "CONFIG=run_cpu"), "the Makefile that was typed"


def test_the_documented_environment_for_unsloth_sees_the_wheel_and_its_libraries(run: Run, installed: Path) -> None:
    """All of the recipe but its last line, which downloads the packages."""
    [recipe] = re.findall(
        r"^(overlay=.*?)\n[^\n]*-m pip[^\n]*\n```", (ROOT / "docs/models.md").read_text(), re.M | re.S
    )
    run("bash", "-ec", f'{recipe}\ntest -f "$pins"')
    overlay = f"{installed.parent}-unsloth/bin/python"
    assert run(overlay, "-c", "import sft_play, torch; print(sft_play.__file__)").startswith(str(installed.parent))


@pytest.mark.cold
@pytest.mark.broad
def test_files_of_the_working_folder_shadow_no_library(run: Run, tmp_path: Path, tiny: Path) -> None:
    run("sft-play", "init")
    config = tiny_config(tmp_path, tiny, rows=8, steps=2)
    for name in ("csv", "random", "tokenizers", "datasets", "evaluate", "yaml", "psutil", "accelerate", "transformers"):
        (tmp_path / f"{name}.py").write_text(
            "import pathlib\npathlib.Path('imported').touch()\nraise RuntimeError(__name__)\n"
        )
    for name, command in (("one", "train-distributed"), ("two", "train-deepspeed")):
        run("sft-play", command, "NUM_GPUS=2", f"CONFIG={config}", f"RUN_NAME={name}", timeout=500)
    assert "one" in run("make", "runs") and "finished" in run("python", "-m", "sft_play", "runs")
    (tmp_path / "sitecustomize.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    refused = ("sft-play", "train-deepspeed", "NUM_GPUS=2", f"CONFIG={config}", "RUN_NAME=three")
    assert "sitecustomize.py: DeepSpeed's workers would run it" in run(*refused, code=3)
    assert not (tmp_path / "imported").exists()


@pytest.mark.long
def test_quickstart_trains_and_scores(run: Run, tmp_path: Path) -> None:
    words = "RUN_NAME=q TRAIN_MAX_STEPS=2 TRAIN_GLOBAL_BATCH_SIZE=2 EVAL_SAMPLES=4 TRAIN_GENERATION_MAX_NEW_TOKENS=8"
    shown = run("sft-play", "quickstart", *words.split(), timeout=580)
    assert "ROUGE-L" in shown and (tmp_path / "runs" / "q" / "model").is_dir()
