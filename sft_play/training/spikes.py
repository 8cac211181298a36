"""Steps whose gradient norm jumps (`train.spike_guard`): written down with their rows, and left out where that is asked."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_play.files import append_json_line, read_json_lines, write_text
from sft_play.runs.space import side_file

WINDOW, LEAST = 50, 10
"""Finite norms that are compared with at most, and at least."""
WHAT = "the rows of a step whose gradient norm jumps"


class SpikeGuard(TrainerCallback, ExportableState):
    """Compares each step's gradient norm with the median of those before it.

    The norm is that of the gradients over all ranks, so every rank decides alike. The norms seen so far are part of a checkpoint: a
    resumed run decides as the uninterrupted one would. A jump counts among the norms too: a new level is one after 25 steps.
    """

    def __init__(self, mode: str, factor: float, path: Path, rank: int) -> None:
        """`path`: `logs/spikes.jsonl`, to which each rank appends a line for its own rows."""
        self.mode, self.factor, self.path, self.rank = mode, factor, path, rank
        self.norms: list[float] = []
        self.found: list[int] = []
        """Steps that jumped."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Takes up what the checkpoint holds, and forgets lines of steps that come again."""
        held = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = (held or {}).get("attributes", {})
        self.norms, self.found = list(attributes.get("norms", [])), list(attributes.get("found", []))
        if self.rank == 0 and self.path.is_file():
            lines = read_json_lines(self.path)
            kept = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= state.global_step]
            with side_file(self.path, WHAT):
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def jumps(self, norm: float, *, step: int, rows: list[int]) -> bool:
        """Takes up the norm of a step; returns whether its update is to be left out. A norm that is no number is not judged here."""
        if self.mode == "off" or not math.isfinite(norm):
            return False
        before = self.norms[-WINDOW:]
        self.norms = [*before, norm][-WINDOW:]
        if len(before) < LEAST:
            return False
        median = statistics.median(before)
        if norm <= self.factor * median:
            return False
        skipped = self.mode == "skip"
        self.found.append(step)
        facts = {
            "step": step,
            "norm": norm,
            "median": median,
            "skipped": skipped,
            "rank": self.rank,
            "rows": rows,
            "time": time.time(),
        }
        with side_file(self.path, WHAT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self.path, facts)
        if self.rank == 0:
            done = "its update is left out" if skipped else "the update is made"
            times = f"{norm / median:.1f} times the median {median:.3g}" if median else f"the median is {median:.3g}"
            print(f"step {step}: the gradient norm jumps to {norm:.3g}, {times}; {done}; rows: {self.path}", flush=True)
        return skipped

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps (the interface of `ExportableState`)."""
        return {"args": {}, "attributes": {"norms": self.norms, "found": self.found}}
