"""Free space before a launch: a run that cannot keep its checkpoints is refused before anything starts (T7)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.launch.run_folder import has_started
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.space import NO_ROOM, UNWRITABLE, describe

SPARE_BYTES = 64 * 2**20
"""Logs, TensorBoard, tokenizer and JSON files of a run."""
FULL_BYTES = 2**20
"""A disk with less free is full: a write that failed, or a rank that left no record, is explained by it."""


def checkpoint_bytes(plan: Plan) -> int:
    """Returns the size of one checkpoint: what is trained and its optimizer states (for `full`, the whole model)."""
    parts = [rank.memory_bytes for rank in plan.ranks]
    sharded = plan.strategy in {"zero1", "zero2", "zero3", "fsdp2"}

    def total(name: str, *, shards: bool) -> int:
        values = [int(part.get(name, 0)) for part in parts]
        return sum(values) if shards else max(values, default=0)

    shards_weights = plan.strategy in {"zero3", "fsdp2"}
    weights = total("adapters", shards=shards_weights) + total("trained", shards=shards_weights)
    return weights + total("optimizer", shards=sharded)


def needed_bytes(plan: Plan, config: Config, run: RunFolder) -> int:
    """Returns what the run will still take at its fullest: kept checkpoints, the best one, a new one beside them, and `model/`.

    Checkpoints that it has already have their space; they never have that of the new one or of the model.
    """
    one = checkpoint_bytes(plan)
    limit = config.train.save_total_limit
    kept = 0 if config.train.save_strategy == "no" else (3 if limit is None else limit) + 1
    there = min(kept * one, occupied_bytes(run.checkpoints))
    return SPARE_BYTES + one * (kept + 1 + bool(kept)) - there


def occupied_bytes(folder: Path) -> int:
    """Returns the bytes that the files below `folder` take on the disk; 0 where it is not there."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(path) / name).lstat().st_blocks * 512
    return total


def is_full(folder: Path) -> bool:
    """Whether the disk of `folder` has less than `FULL_BYTES` left; not for a folder that is gone."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def is_read_only(folder: Path) -> bool:
    """Whether the file system of `folder` takes no writes any more; not for a folder that is gone."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def is_gone(folder: Path) -> bool:
    """Whether there is no such folder any more; not for one whose disk does not answer."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def folder_gone(run: RunFolder) -> HardwareError:
    """Returns the error of a run whose folder was there when it started."""
    return HardwareError(
        "the run's folder is gone: was it moved or deleted while it trained?",
        place=str(run.path),
        hint=f"where it was moved, put it back, then: make resume RUN={run.name} (or, as it is now: make resume RUN=FOLDER)",
    )


def require_disk_space(plan: Plan, config: Config, run: RunFolder) -> None:
    """Raises `HardwareError` when the disk of the run folder is too small for the run's checkpoints."""
    needed = needed_bytes(plan, config, run)
    free = shutil.disk_usage(run.path).free
    if free < needed:
        raise HardwareError(
            f"the disk of `{run.path.parent}` has {free / 2**30:.2f} GiB free, but this run needs {needed / 2**30:.2f} GiB: "
            f"checkpoints of {checkpoint_bytes(plan) / 2**30:.2f} GiB each, the model and logs",
            hint="free some space, set RUNS_DIR to another disk, or lower `train.save_total_limit`",
        )


@contextlib.contextmanager
def disk_refusals_told(run: RunFolder) -> Iterator[None]:
    """Turns an `OSError` of the body that says that a disk takes no more, or no writes, into a `HardwareError` with its place.

    Any other error is raised as it is: a permission that lacks outside of the run's folder says nothing of a disk.
    """
    try:
        yield
    except OSError as error:
        inside = isinstance(error.filename, str | os.PathLike) and run.path.absolute() in Path(error.filename).absolute().parents
        full = error.errno in NO_ROOM
        if not full and (error.errno not in UNWRITABLE or (error.errno in (errno.EACCES, errno.EPERM) and not inside)):
            raise
        place = error.filename if isinstance(error.filename, str | os.PathLike) and not inside else run.path
        then = f"make resume RUN={run.name}" if has_started(run) else "the same command again"
        raise HardwareError(
            describe(error) if full else f"cannot be written: {error.strerror}",
            place=str(place),
            hint=f"{'free some space' if full else '`mount` and `dmesg` may say why'}, then: {then}",
        ) from error
