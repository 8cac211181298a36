"""Aim (`train.report_to: aim`): what is logged, as a run of the repository that `AIM_REPO` names. transformers has no callback for it.

Aim's own callback keeps all environment variables, tokens among them, and begins another run at each resume: hence this one.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from sft_play.files import read_json, write_text
from sft_play.runs.folder import RunFolder

HASH = ".aim-run"
"""File in the run's folder with the name that Aim gave its run, so that a resumed one goes on in it."""


class AimTracker(TrainerCallback):
    """Writes numbers as sequences of an Aim run, on rank 0; a step that is trained again after a resume replaces its value."""

    def __init__(self, run: RunFolder) -> None:
        self.folder = run
        self.run: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from aim import Run

        known = self.folder.path / HASH
        before = known.read_text(encoding="utf-8").strip() if state.global_step and known.is_file() else None
        self.run = Run(
            before, repo=os.environ.get("AIM_REPO") or str(self.folder.path), experiment=self.folder.name, force_resume=True,
            log_system_params=False, capture_terminal_logs=False, system_tracking_interval=None,
        )  # fmt: skip
        self.run.name = self.folder.name
        self.run["config"] = read_json(self.folder.config)["config"]
        write_text(known, f"{self.run.hash}\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        for name, value in (logs or {}).items():
            kind, plain = ("eval", name.removeprefix("eval_")) if name.startswith("eval_") else ("train", name)
            place, _dash, of_each = plain.partition("_")
            if isinstance(value, int | float):
                self._track(plain, value, state, {"subset": kind})
            elif isinstance(value, list) and place in ("rank", "node"):  # `rank_loss`: the loss of each rank
                for index, one in enumerate(value):
                    self._track(of_each, one, state, {"subset": kind, place: index})

    def _track(self, name: str, value: float, state: Any, context: dict[str, Any]) -> None:
        self.run.track(float(value), name=name, step=state.global_step, epoch=state.epoch, context=context)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.close()
