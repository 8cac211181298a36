"""A run whose batch numbers were both given keeps its global batch on another number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, load_config
from sft_play.launch.resume import with_its_batch
from tests.plans import simple_plan


def loaded(folder: Path, *typed: str, **train: object) -> tuple[LoadedConfig, Call]:
    path = folder / "x.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in train.items())
    path.write_text("model: {name: x}\ndata: {train_path: x.jsonl}\ntrain:\n  max_steps: 4\n" + lines)
    overrides = tuple(
        Override(key=f"train.{key}", text=str(value), origin="make") for key, value in (one.split("=") for one in typed)
    )
    return load_config(path, overrides), Call(command="resume", overrides=overrides)


@pytest.mark.parametrize(
    ("typed", "train", "world", "expected"),
    [
        ((), {"batch_size": 2, "grad_accum": 2}, 2, (2, 2, "auto")),
        ((), {"batch_size": 2, "grad_accum": 2}, 3, (2, "auto", 8)),
        (("batch_size=1",), {"batch_size": 2, "grad_accum": 2}, 2, (1, "auto", 8)),
        (("batch_size=1", "grad_accum=1"), {"batch_size": 2, "grad_accum": 2}, 2, (1, 1, "auto")),
        ((), {"batch_size": 4, "global_batch_size": 8}, 4, ("auto", "auto", 8)),
    ],
)
def test_the_global_batch_stays(
    typed: tuple[str, ...], train: dict[str, object], world: int, expected: tuple[object, ...], tmp_path: Path
) -> None:
    config, call = loaded(tmp_path, *typed, **train)
    found, note = with_its_batch(config, call, replace(simple_plan(), global_batch_size=8), world)
    now = found.config.train
    assert (now.batch_size, now.grad_accum, now.global_batch_size) == expected
    changed = (now.batch_size, now.grad_accum) != (config.config.train.batch_size, config.config.train.grad_accum)
    assert bool(note) == changed
    if note:
        assert "stays 8 rows" in note and "is computed again" in note


def test_ranks_with_slices_of_the_same_rows_count_once(tmp_path: Path) -> None:
    config, call = loaded(tmp_path, batch_size=8)
    config = replace(config, config=replace(config.config, launch=replace(config.config.launch, tensor_parallel=2)))
    assert with_its_batch(config, call, replace(simple_plan(), global_batch_size=8), 2)[1] is None
