"""Finds, publishes and removes checkpoints. No torch, so that a launcher can do it.

A checkpoint is written as `checkpoints/.step-000040.partial`, gets its manifest, and only then its name, by rename.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sft_play.files import sync_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import verify, write_manifest

NAME = re.compile(r"step-(\d{6,})")


def step_of(checkpoint: Path) -> int:
    """Returns the optimizer step of a checkpoint's folder name."""
    match = NAME.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not named like a checkpoint"
    return int(match.group(1))


def published(run: RunFolder) -> list[Path]:
    """Returns the folders that bear a checkpoint's name, the newest first, checked or not."""
    if not run.checkpoints.is_dir():
        return []
    found = [path for path in run.checkpoints.iterdir() if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=step_of, reverse=True)


def newest_valid(run: RunFolder) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint whose every file is whole, and why newer ones were skipped."""
    skipped: list[str] = []
    for checkpoint in published(run):
        reason = verify(checkpoint)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name}: {reason}")
    return None, skipped


def partial_folder(run: RunFolder, step: int) -> Path:
    """Returns where a checkpoint is written before it is published."""
    return run.checkpoints / f".{run.checkpoint(step).name}.partial"


def publish(run: RunFolder, step: int) -> Path:
    """Lists, syncs and renames a complete partial folder, and points `last` at it. Returns the checkpoint."""
    partial, target = partial_folder(run, step), run.checkpoint(step)
    write_manifest(partial)
    if target.exists():  # a resumed run has reached this step again, from an older checkpoint
        aside = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        partial.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        partial.rename(target)
    sync_folder(run.checkpoints)
    link(run.last, target)
    return target


def link(name: Path, target: Path) -> None:
    """Points the relative link `name` at `target` in one step."""
    temporary = name.with_name(f".{name.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(name)


def rotate(run: RunFolder, keep: int | None) -> list[Path]:
    """Removes the oldest checkpoints beyond `keep`; never the newest, never the best. Returns what was removed."""
    if keep is None:
        return []
    protected = {run.best.resolve() if run.best.exists() else None, run.last.resolve() if run.last.exists() else None}
    removed = []
    for checkpoint in published(run)[max(1, keep) :]:
        if checkpoint.resolve() not in protected:
            doomed = checkpoint.with_name(f".{checkpoint.name}.removed")  # no longer a checkpoint, whatever happens next
            checkpoint.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(checkpoint)
    return removed


def remove_leftovers(run: RunFolder) -> None:
    """Removes what an earlier, killed process left half-written."""
    if run.checkpoints.is_dir():
        for path in run.checkpoints.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
