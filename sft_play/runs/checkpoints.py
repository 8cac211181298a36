"""Finds, publishes and removes checkpoints. No torch, so that a launcher can do it.

A checkpoint is written as `checkpoints/.step-000040.partial`, gets its manifest, and only then its name, by rename. The process that
writes holds the run's writer lock, which the kernel gives back however it ends: what others left half-made is removed by that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sft_play.files import read_json, sync_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import NAME as MANIFEST
from sft_play.runs.manifest import verify

NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,8})")
"""As `RunFolder.checkpoint` writes it, and in no other way: of two folders for one step, or a number in other digits, one would win by chance."""
LEFT = re.compile(rf"\.({NAME.pattern})\.(partial|removed|replaced)")
"""Folders on their way to a name, or from one."""
_writing: set[Path] = set()
"""Locks that this process holds; a POSIX lock would be given away by opening the file a second time."""


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


def newest_valid(run: RunFolder, *, sizes_only: bool = False) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint whose every file is whole and whose name is its step's, and why newer ones were skipped.

    What a process that has ended was about to replace gets its name back first. `sizes_only`: see `verify`.
    """
    _give_names_back(run)
    skipped: list[str] = []
    for checkpoint in published(run):
        reason = verify(checkpoint, sizes_only=sizes_only) or _renamed(checkpoint)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name}: {reason}")
    return None, skipped


def _renamed(checkpoint: Path) -> str | None:
    """Returns in words that a checkpoint says of itself that it is of another step than its name; `None` where it says nothing."""
    for file, key in (("stamp.json", "step"), ("trainer_state.json", "global_step")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            step = read_json(checkpoint / file).get(key)
            if isinstance(step, int) and step:
                own = f"step-{step:06d}"
                return None if step == step_of(checkpoint) else f"it is of step {step}, by its `{file}`: name it `{own}` again"
    return None


def partial_folder(run: RunFolder, step: int) -> Path:
    """Returns where a checkpoint is written before it is published."""
    return run.checkpoints / f".{run.checkpoint(step).name}.partial"


def publish(run: RunFolder, step: int) -> Path:
    """Renames a sealed partial folder, syncs that to the disk and points `last` at it. Returns the checkpoint."""
    partial, target = partial_folder(run, step), run.checkpoint(step)
    assert (partial / MANIFEST).is_file(), f"{partial} is not sealed"
    if target.exists():  # a resumed run has reached this step again, from an older checkpoint
        aside = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        try:
            partial.rename(target)
        except OSError:
            aside.rename(target)
            raise
        sync_folder(run.checkpoints)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        partial.rename(target)
        sync_folder(run.checkpoints)
    link(run.last, target)
    return target


def link(name: Path, target: Path) -> None:
    """Points the relative link `name` at `target` in one step. A folder in its place, of a run copied with links followed, goes."""
    temporary, old = name.with_name(f".{name.name}.new"), name.with_name(f".{name.name}.old")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    if name.is_dir() and not name.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
        name.rename(old)
    temporary.replace(name)
    shutil.rmtree(old, ignore_errors=True)


def rotate(run: RunFolder, keep: int | None, verified: Path, *, best: Path | None = None) -> list[Path]:
    """Removes the oldest checkpoints beyond `keep`, all older than `verified`, which was just compared with its manifest.

    Never removes `verified`, nor the best (`best`, and what the link of that name points at), nor the last. Returns what was removed.
    """
    if keep is None:
        return []
    protected = {path.resolve() for path in (run.best, run.last, verified, best) if path is not None and path.exists()}
    removed = []
    for checkpoint in published(run)[max(1, keep) :]:
        if checkpoint.resolve() not in protected and step_of(checkpoint) < step_of(verified):
            doomed = checkpoint.with_name(f".{checkpoint.name}.removed")  # no longer a checkpoint, whatever happens next
            checkpoint.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(checkpoint)
    return removed


def rotate_own(run: RunFolder, keep: int | None, step: int) -> None:
    """Removes what a machine with a run folder of its own keeps of its ranks at older steps than `step`, but the newest `keep`.

    Two stay at least, since the newest checkpoint may turn out to be damaged. Several ranks may call it together.
    """
    if keep is None:
        return
    named = [path for path in run.random_states(0).parent.glob("step-*") if NAME.fullmatch(path.name)]
    folders = sorted(named, key=step_of, reverse=True)
    for folder in folders[max(2, keep) :]:
        if step_of(folder) < step:
            shutil.rmtree(folder, ignore_errors=True)


def claim(run: RunFolder) -> int | None:
    """Takes the run's writer lock until this process ends. Returns its descriptor; `None` where the disk knows no locks."""
    path = _lock_file(run)
    if path in _writing:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a folder that cannot be written says so again, and better, when a checkpoint is
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process alone: a forked child does not keep it
    except OSError:
        os.close(descriptor)
        return None
    _writing.add(path)
    return descriptor


def clean_up(run: RunFolder) -> list[str]:
    """Removes what processes that have ended left half-made, and says what; nothing while a live process writes."""
    if not run.checkpoints.is_dir():
        return []
    _give_names_back(run)
    said = []
    with _no_writer(run) as free:
        for path in sorted(run.checkpoints.iterdir()) if free else []:
            if match := LEFT.fullmatch(path.name):
                if match.group(3) == "partial":
                    said.append(f"{match.group(1)}: the process that wrote it ended before it was complete")
                shutil.rmtree(path, ignore_errors=True)
            elif path.name in (".last.new", ".best.new"):
                with contextlib.suppress(OSError):
                    path.unlink()
            elif path.name in (".last.old", ".best.old"):
                shutil.rmtree(path, ignore_errors=True)
    return said


def discard(run: RunFolder, step: int) -> None:
    """Removes a partial folder that could not be completed."""
    shutil.rmtree(partial_folder(run, step), ignore_errors=True)


def _give_names_back(run: RunFolder) -> None:
    """Undoes a replacement that its process did not live to complete."""
    with _no_writer(run) as free:
        for path in run.checkpoints.glob(".step-*.replaced") if free else []:
            target = run.checkpoints / path.name[1:].removesuffix(".replaced")
            if not target.exists():
                with contextlib.suppress(OSError):
                    path.rename(target)


def _lock_file(run: RunFolder) -> Path:
    return run.path.resolve() / ".writer.lock"


@contextlib.contextmanager
def _no_writer(run: RunFolder) -> Iterator[bool]:
    """Yields whether no other live process writes checkpoints, and lets none begin meanwhile."""
    path = _lock_file(run)
    if path in _writing:
        yield True  # it is this process that would write, and it does not while it asks
        return
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # nobody ever wrote here
        yield True
        return
    except OSError:
        yield False
        return
    try:
        free = True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            free = error.errno not in (errno.EACCES, errno.EAGAIN)  # any other says that this disk knows no locks
        yield free
    finally:
        os.close(descriptor)
