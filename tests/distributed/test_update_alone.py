"""The update of a step does not depend on how its rows are split: over micro-batches, packs and ranks, for every key
and family that could.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families import build_family
from tests.numerics.test_row_alone import long_rope
from tests.training_runs import Trial, column, make_run, must_train, same_curves

PACK = (("pack_tokens", 64),)
SPLITS: dict[str, dict[str, Any]] = {
    "one row": {"ranks": ((1, 8),)},
    "all rows": {"ranks": ((8, 1),)},
    "packed": {"ranks": ((2, 4),), "plan": PACK},
    "padded": {"ranks": ((4, 2),), "layout": "padded"},
    "two ranks": {"strategy": "ddp", "ranks": ((2, 2), (2, 2))},
}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "neftune": ("llama", ("train.neftune_noise_alpha: 15",)),
    "longrope": ("phi3", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_every_split_gives_the_same_losses(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = build_family(tmp_path / "base", family, **(long_rope(family) if case == "longrope" else {}))
    common = ("train.save_strategy: 'no'", *settings)
    runs = {}
    for name, split in SPLITS.items():
        trial = Trial(steps=4, settings=common, learning_rate=1e-2, **split)
        runs[name] = must_train(make_run(tmp_path / name.replace(" ", "-"), base, trial))
    for run in runs.values():
        same_curves(run.path, runs["one row"].path)
    if case == "neftune":
        quiet = must_train(make_run(tmp_path / "quiet", base, Trial(steps=4, settings=common[:1], learning_rate=1e-2)))
        assert column(quiet, "loss")[0] != pytest.approx(column(runs["one row"], "loss")[0], rel=1e-5)
