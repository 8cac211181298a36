"""`make setup-accelerate`: writes a config for this machine, says why, takes answers as variables; what it wrote is
read back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.__main__ import main
from sft_play.launch.settings import read_accelerate_config
from tests.conftest import Program, called, environment


@pytest.fixture
def setup(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return the command in an empty folder, on a machine without a GPU."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    variables = environment(cache, tmp_path / "runs", {"CUDA_VISIBLE_DEVICES": ""})
    return lambda *words, **_: called(lambda: main(["setup-accelerate", *words]), variables, cwd=folder)


def test_setup_chooses_a_configuration_and_says_why(setup: Program) -> None:
    outcome = setup()
    assert outcome.code == 0, outcome.err
    assert "wrote accelerate_configs/local.yaml" in outcome.out
    assert "mixed precision no: " in outcome.out
    assert "  1 machine: none other was named" in outcome.out
    assert "ACCELERATE_CONFIG=accelerate_configs/local.yaml" in outcome.out
    choices = read_accelerate_config(Path("accelerate_configs/local.yaml"))
    assert choices.num_gpus in (1, 2)
    assert choices.train == {"bf16": False, "fp16": False}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("NUM_GPUS=3 STRATEGY=ddp", ("ddp", 3, 1)),
        ("NUM_GPUS=2 STRATEGY=zero3", ("zero", 2, 1)),
        ("NUM_GPUS=2 STRATEGY=fsdp2 NUM_NODES=2", ("fsdp2", 2, 2)),
        ("NUM_GPUS=1", ("single", 1, 1)),
    ],
)
def test_answers_are_accepted_as_variables(setup: Program, arguments: str, expected: tuple[str, int, int]) -> None:
    report = setup(*arguments.split(), "OUT=mine.yaml", "JSON=1").json
    assert report["path"] == "mine.yaml" and len(report["reasons"]) == 4
    choices = read_accelerate_config(Path("mine.yaml"))
    assert (choices.strategy, choices.num_gpus, choices.num_nodes) == expected
    if choices.deepspeed:
        assert choices.deepspeed.stage == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("MIXED_PRECISION=fp8", 2, "`MIXED_PRECISION` is `fp8`"),
        ("MIXED_PRECISION=fp16", 3, "CPUs cannot train in"),
        ("STRATEGY=ddp NUM_GPUS=1", 2, "the number of processes is 1"),
        ("STRATEGY=single NUM_GPUS=2", 2, "the number of processes is 2"),
    ],
)
def test_invalid_answers_are_refused(setup: Program, arguments: str, code: int, message: str) -> None:
    setup(*arguments.split()).refused(code, message)
    assert list(Path().iterdir()) == []


def test_only_generated_files_are_replaced(setup: Program) -> None:
    Path("notes.txt").write_text("buy: milk\n")
    setup("OUT=notes.txt").refused(2, "`notes.txt` exists and was not written by `make setup-accelerate`")
    assert Path("notes.txt").read_text() == "buy: milk\n"
    assert setup("OUT=mine.yaml").code == setup("OUT=mine.yaml").code == 0
    assert "num_processes" in Path("mine.yaml").read_text()


def test_an_out_path_that_cannot_be_written_is_refused(in_process: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = in_process("setup-accelerate", "NUM_GPUS=2", "STRATEGY=ddp", f"OUT={tmp_path / 'file' / 'x.yaml'}")
    done.refused(2, "error: OUT: ", "cannot be written", "hint: OUT=")
