"""A `TrainContext` for tests of callbacks and states that have no training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sft_play.config.schema import Config, ModelConfig
from sft_play.runs.folder import RunFolder
from sft_play.runs.stamp import Stamp
from sft_play.training.process import Activity
from sft_play.training.ranks import Ranks, TrainContext
from tests.plans import simple_plan

ALONE = Ranks()


def context_of(
    folder: Path,
    ranks: Ranks = ALONE,
    *,
    plan: Any = None,
    **config: dict[str, Any],
) -> TrainContext:
    """Return the context of a run in `folder`; `config`: section -> keys that are not the default."""
    base = Config(model=ModelConfig(name="m"))
    changed = {section: replace(getattr(base, section), **keys) for section, keys in config.items()}
    return TrainContext(
        config=replace(base, **changed),
        plan=plan or simple_plan(world_size=ranks.world),
        run=RunFolder(folder),
        stamp=cast(Stamp, None),
        ranks=ranks,
        activity=Activity(),
        metrics=None,
    )
