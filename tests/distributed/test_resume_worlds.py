"""A run resumed on as many, fewer and more ranks: bit for bit on as many, with the same updates on another number, and
without pickles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_play.runs.folder import RunFolder
from tests.families import build_family
from tests.tiny_models import build_tiny_llama
from tests.training_runs import (
    Trained,
    Trial,
    holdings,
    make_run,
    must_train,
    resume_from,
    same_curves,
    same_to_the_bit,
    train_once,
    weights,
)

SHARES = {1: ((4, 2),), 2: ((2, 2), (2, 2)), 3: ((1, 3),) * 3}
"""Micro-batch and accumulation of each rank; 8 rows a step everywhere."""
DROPOUT = 0.1
HERE = 5
"""The checkpoint to resume from: in the middle of the second epoch (an epoch has 3 steps)."""
NO_PICKLE = (".safetensors", ".json", ".txt", ".jinja", ".model", ".md")
LONG = pytest.mark.long


def trial(strategy: str, world: int, *, dropout: float = 0.0, **changes: Any) -> Trial:
    """Return a trial; only one that keeps its number of ranks has `dropout`, since others draw other masks."""
    adapted = changes.get("mode", "full") != "full"
    settings = ("train.save_steps: 1", *([f"tuning.lora.dropout: {dropout}"] if adapted else []))
    values: dict[str, Any] = {"strategy": strategy, "ranks": SHARES[world], "settings": settings, "steps": 7}
    return Trial(**(values | changes))


def same_updates(run: RunFolder, again: RunFolder) -> None:
    same_curves(again.path, run.path)
    trained = [{row for rank in holdings(folder) for row in rank["rows_trained"]} for folder in (again, run)]
    assert trained[0] <= trained[1]
    first, second = weights(run), weights(again)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6)


STRATEGIES = {"ddp": "lora", "zero2": "full", "zero1": "lora", "zero3": "full", "fsdp2": "full"}
DEFAULT = ("ddp", "zero2")
MARKED = [pytest.param(name, marks=() if name in DEFAULT else LONG) for name in STRATEGIES]


@pytest.fixture(scope="module")
def trained_dropping(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("dropping")
    return train_once(folder, build_tiny_llama(folder / "llama", attention_dropout=DROPOUT))


@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("strategy", MARKED)
@pytest.mark.broad_but("ddp-1", "zero2-3")
def test_a_run_of_two_ranks_continues(
    strategy: str, world: int, trained: Trained, trained_dropping: Trained, tmp_path: Path
) -> None:
    dropout, train = (DROPOUT, trained_dropping) if world == 2 else (0.0, trained)
    run = train(trial(strategy, 2, dropout=dropout, mode=STRATEGIES[strategy]))
    now = trial(
        "single" if (strategy, world) == ("ddp", 1) else strategy, world, dropout=dropout, mode=STRATEGIES[strategy]
    )
    again = resume_from(run, tmp_path / "run", HERE, now)
    if world == 2:
        same_to_the_bit(again, run)
        states = [load_file(run.checkpoint(step) / "rng-rank0.safetensors")["torch"] for step in (HERE, HERE + 1)]
        assert not torch.equal(*states), "each step draws"
    else:
        same_updates(run, again)


@pytest.mark.parametrize("strategy", MARKED)
def test_no_file_of_a_checkpoint_is_a_pickle(strategy: str, trained: Trained) -> None:
    run = trained(trial(strategy, 2, mode=STRATEGIES[strategy]))
    for folder in (run.checkpoint(HERE), run.model):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files and [path.name for path in files if path.suffix not in NO_PICKLE] == []
        for path in files:
            head = path.read_bytes()[:16]
            assert not head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")), path
    states = json.loads((run.checkpoint(HERE) / "states.json").read_text())
    assert states["strategy"] == strategy and states["world_size"] == 2 and states["reshardable"]
    assert not [path.name for path in run.model.iterdir() if path.name.startswith(("states", "optimizer", "rng"))]


@LONG
@pytest.mark.parametrize(
    ("before", "after"), [(("ddp", 2), ("zero2", 3)), (("zero2", 2), ("fsdp2", 2)), (("fsdp2", 2), ("zero3", 3))]
)
def test_a_run_continues_under_another_strategy(
    before: tuple[str, int], after: tuple[str, int], tiny: Path, tmp_path: Path
) -> None:
    run = must_train(make_run(tmp_path / "run", tiny, trial(*before)))
    same_updates(run, resume_from(run, tmp_path / "again", HERE, trial(*after)))


@LONG
@pytest.mark.parametrize("strategy", ["single", "zero3", "fsdp2"])
def test_a_model_whose_file_has_other_names_is_restored(strategy: str, tmp_path: Path) -> None:
    """transformers writes Mixtral's experts one by one, as the hub has them, and keeps them as one tensor."""
    base = build_family(tmp_path / "mixtral", "mixtral")
    now = trial(strategy, 1 if strategy == "single" else 2)
    run = must_train(make_run(tmp_path / "run", base, now))
    same_to_the_bit(resume_from(run, tmp_path / "again", HERE, now), run)


@LONG
@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adagrad", "lion_32bit"])
def test_other_optimizers_are_restored(optim: str, tiny: Path, tmp_path: Path) -> None:
    typed = (f"train.optim: {optim}", *(("train.optim_args: momentum=0.9",) if optim == "sgd" else ()))
    now = trial("single", 1, settings=(*trial("single", 1).settings, *typed))
    run = must_train(make_run(tmp_path / "run", tiny, now))
    same_to_the_bit(resume_from(run, tmp_path / "again", HERE, now), run)
