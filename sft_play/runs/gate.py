"""Check of a run's folder, which may be a stranger's, before anything in it is read or written.

A run has plain files and folders only; every command refuses links, pipes and devices here. Changes between this check
and the use of a file are caught when it is opened (`files.open_plain`, `files.open_own`), without following links.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.config.metrics import typed_metrics
from sft_play.config.reader import misfit
from sft_play.errors import CheckpointError
from sft_play.files import read_object
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import as_typed

LINKS = frozenset({"last", "best", ".last.new", ".best.new"})
"""Links in `checkpoints/`, each to a checkpoint next to it."""
TRACKER = "wandb"
"""Folder of a tracker, which links to its latest run there; nothing else reads or writes it."""


def check_run(run: RunFolder, *, writes: bool = False) -> RunFolder:
    """Return `run`. Raise `CheckpointError` for files that a run cannot contain.

    Another folder, such as `RUN=/`, is its reader's to refuse: nobody is to remove anything there.
    """
    if not writes and not any(os.path.lexists(path) for path in (run.config, run.events)):
        return run

    def unreadable(error: OSError) -> None:
        hidden = isinstance(error, PermissionError) and not writes
        if not hidden and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for folder, folders, files in os.walk(run.path, onerror=unreadable):
        for path in (Path(folder, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # it has vanished
                kind = stat.S_IFMT(path.lstat().st_mode)
                if kind == stat.S_IFLNK and not _is_ours(run, path):
                    hint = f"a link may lead to any file of yours: rm {path}"
                    raise _refused(path, f"is a link to `{_target(path)}`", hint)
                if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                    raise _refused(path, "is a pipe, a device or a socket", f"rm {path}")
    return run


def _is_ours(run: RunFolder, link: Path) -> bool:
    """Return whether a link is one that we, or a tracker in its own folder, create."""
    if link.parent == run.checkpoints and link.name in LINKS:
        return "/" not in _target(link) and _target(link).startswith("step-")
    tracked = run.path / TRACKER
    return tracked in link.parents and link.resolve().is_relative_to(tracked.resolve())


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return "?"


def _refused(path: Path, what: str, hint: str) -> CheckpointError:
    return CheckpointError(f"{what}, and a run contains plain files and folders only", place=str(path), hint=hint)


def all_runs() -> list[RunFolder]:
    """Return every folder of `RUNS_DIR` with a run's configuration, newest first, without checking them."""
    runs = []
    with contextlib.suppress(OSError):
        for folder in runs_folder().iterdir():
            with contextlib.suppress(OSError):
                runs.append((os.lstat(folder / "config.json").st_mtime, RunFolder(folder)))
    return [run for _, run in sorted(runs, key=lambda dated: (-dated[0], dated[1].name))]


# Facts from a run's files, as far as they have the expected types.


Number = float | None
_FIGURES = (
    "steps",
    "final_loss",
    "training_seconds",
    "tokens_per_second",
    "steady_tokens_per_second",
    "peak_memory_bytes",
    "energy_kwh",
    "eval_loss",
    "eval_rougeL",
    "best_step",
    "best_metric",
    "model_step",
)
_SPLIT = {
    "path": str,
    "sources": list[Mapping[str, Any]],
    **dict.fromkeys(("rows", "tokens", "label_tokens", "longest", "median"), Number),
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "config.json": {
        "config": {
            "model": {"name": str | None},
            "tuning": {"mode": str | None},
            "train": {"metric_for_best_model": str | None},
            "eval": {"metrics": list[str] | None},
            "data": {"sources": list[Mapping[str, Any]] | None, "train_path": str | None},
        },
        "origins": Mapping[str, Any],
    },
    "plan.json": {
        **dict.fromkeys(("steps", "world_size", "num_nodes"), Number),
        **dict.fromkeys(("tensor_parallel", "sequence_parallel"), Number),
        "strategy": str,
        "stages": list[int],
    },
    "prepared.json": {"model": {"name": str | None}, "train": _SPLIT, "validation": _SPLIT},
    "training_metrics.json": {
        **dict.fromkeys(_FIGURES, Number),
        "forecast": {**dict.fromkeys(_FIGURES, Number), "basis": str | None},
        "work": Mapping[str, Any] | None,
    },
    "phase.json": {"phase": str},
    "manifest.json": {"sources": list[Mapping[str, Any]], "labels": Mapping[str, int]},
}


def read_facts(path: Path) -> dict[str, Any]:
    """Return the JSON object of a run's file without parts that are incomplete, missing or of another type."""
    shape = SHAPES.get(path.name, {})
    return {
        name: value
        for name, value in read_object(path).items()
        if name not in shape or misfit(value, shape[name]) is None
    }


def eval_command(run: RunFolder) -> str:
    """Return the command that scores a run's answers, with the metrics whose code runs only if they are typed."""
    config = read_facts(run.config).get("config", {})
    metrics = config.get("eval", {}).get("metrics") or ()
    turned_off = metrics and config.get("train", {}).get("predict_with_generate") is False
    answers = ["TRAIN_PREDICT_WITH_GENERATE=true"] if turned_off else []
    return " ".join([f"make eval RUN={run.typed}", *answers, *map(as_typed, typed_metrics(metrics))])
