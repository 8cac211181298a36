"""Find, publish and remove checkpoints, and choose the weights that a command uses. No torch.

A checkpoint is written as `checkpoints/.step-000040.partial`, gets its manifest, and only then its name, by rename.
Only the launcher that has the run's lock, and its workers, write here; it removes what a killed one left incomplete.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sft_play.errors import CheckpointError, UserError
from sft_play.files import sync_path, typed_path
from sft_play.runs.folder import RunFolder, run_path
from sft_play.runs.manifest import NAME as MANIFEST
from sft_play.runs.manifest import is_state_file, verify
from sft_play.text import as_typed

NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,8})")
"""The name that `RunFolder.checkpoint` writes, and no other spelling: of two folders for one step, either could win."""
UNFINISHED = re.compile(rf"\.({NAME.pattern})\.(partial|removed|replaced)")
"""Folders that are being written, removed or replaced."""


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint's folder name."""
    match = NAME.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not named like a checkpoint"
    return int(match.group(1))


def list_checkpoints(run: RunFolder) -> list[Path]:
    """Return the folders with a checkpoint's name, newest first, without verifying them."""
    if not run.checkpoints.is_dir():
        return []
    checkpoints = [
        path
        for path in run.checkpoints.iterdir()
        if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(checkpoints, key=step_of, reverse=True)


def newest_valid(run: RunFolder, *, sizes_only: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and why newer ones were skipped.

    A replacement that its process did not finish is undone first. `sizes_only`: see `verify`.
    """
    _undo_replacements(run)
    skipped: list[str] = []
    for checkpoint in list_checkpoints(run):
        reason = verify(checkpoint, sizes_only=sizes_only)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name}: {reason}")
    return None, skipped


def partial_folder(run: RunFolder, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is published."""
    return run.checkpoints / f".{run.checkpoint(step).name}.partial"


def publish(run: RunFolder, step: int) -> Path:
    """Rename a sealed partial folder, sync it to disk, point `last` at it, and return the checkpoint."""
    partial, target = partial_folder(run, step), run.checkpoint(step)
    assert (partial / MANIFEST).is_file(), f"{partial} is not sealed"
    replace_folder(target, partial)
    link(run.last, target)
    return target


def replace_folder(target: Path, partial: Path) -> None:
    """Rename `partial` to `target`, which may exist in a resumed or extended run, and sync it to disk."""
    aside = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)  # a checkpoint's next reader restores it if this process ends here
    partial.rename(target)
    sync_path(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def link(name: Path, target: Path) -> None:
    """Atomically point the relative link `name` at `target`, and replace a folder there, which a copy that followed
    links has.
    """
    temporary = name.with_name(f".{name.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    if name.is_dir() and not name.is_symlink():
        shutil.rmtree(name)
    temporary.replace(name)


def rotate(run: RunFolder, keep: int | None, verified: Path, *, best: Path | None = None) -> list[Path]:
    """Remove checkpoints beyond `keep`, incomplete ones first and then the oldest, but only older ones than `verified`,
    which was just compared with its manifest.

    `verified`, the best (`best` and the target of the link of that name) and the last are never removed. Return the
    removed checkpoints.
    """
    if keep is None:
        return []
    protected = {path.resolve() for path in (run.best, run.last, verified, best) if path is not None and path.exists()}
    removed = []
    by_use = sorted(list_checkpoints(run), key=lambda folder: verify(folder, sizes_only=True) is not None)
    for checkpoint in by_use[max(1, keep) :]:
        if checkpoint.resolve() not in protected and step_of(checkpoint) < step_of(verified):
            # Renamed first, so that an interrupted removal leaves no incomplete checkpoint.
            doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
            checkpoint.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(checkpoint)
    return removed


def clean_up(run: RunFolder) -> list[str]:
    """Remove what ended processes left incomplete, and return notes about it; only the process that trains the run may
    call this.
    """
    if not run.checkpoints.is_dir():
        return []
    _undo_replacements(run)
    notes = []
    for path in sorted(run.checkpoints.iterdir()):
        if match := UNFINISHED.fullmatch(path.name):
            if match.group(3) == "partial":
                notes.append(f"{match.group(1)}: the process that wrote it ended before it was complete")
            shutil.rmtree(path, ignore_errors=True)
        elif path.name in (".last.new", ".best.new"):
            with contextlib.suppress(OSError):
                path.unlink()
    return notes


def discard(run: RunFolder, step: int) -> None:
    """Remove a partial folder that could not be completed."""
    shutil.rmtree(partial_folder(run, step), ignore_errors=True)


def _undo_replacements(run: RunFolder) -> None:
    """Undo replacements of checkpoints whose process ended before it completed them."""
    for path in run.checkpoints.glob(".step-*.replaced"):
        target = run.checkpoints / path.name[1:].removesuffix(".replaced")
        if not target.exists():
            with contextlib.suppress(OSError):
                path.rename(target)


# The folder of a run with the weights that a command uses: the final model or a checkpoint.


Kind = Literal["adapter", "full"]

FULL = ("model.safetensors", "model.safetensors.index.json")
PUBLISHED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md")
OF_THE_CHECKPOINT = frozenset({"trainer_state.json", "manifest.json", "stamp.json", "states.json"})


def weights_folder(run: RunFolder, checkpoint: str | None) -> Path:
    """Return the folder that `CHECKPOINT=` names (`best`, `last`, `step-000040`), with links resolved.

    Without a name it is the final model, or the last checkpoint of an unfinished run. A checkpoint's weights are
    compared with its manifest first. Raise `CheckpointError` with the existing names or the damaged file.
    """
    if checkpoint is None and kind_of(run.model):
        return run.model
    if folder := checkpoint_folder(run, checkpoint or "last"):
        damage = verify(folder, needed=_is_for_use)
        if damage:
            hint = "CHECKPOINT= takes another one, and `make resume` continues from the newest complete one"
            raise CheckpointError(f"the checkpoint is damaged: {damage}", place=str(folder), hint=hint)
        return folder
    names = checkpoint_names(run)
    what = f"no checkpoint `{checkpoint}`" if checkpoint else "neither a final model nor a checkpoint yet"
    raise CheckpointError(
        f"the run `{run.name}` has {what}",
        hint=(
            f"its checkpoints: {', '.join(names)}"
            if names
            else f"wait for its first checkpoint, or if it was stopped: make resume RUN={run.typed}"
        ),
    )


def checkpoint_names(run: RunFolder) -> list[str]:
    """Return the names of a run's checkpoints: `best` and `last` if they exist, then the steps."""
    names = [
        *(link.name for link in (run.best, run.last) if _inside(run, link)),
        *sorted(p.name for p in run.checkpoints.glob("step-*")),
    ]
    return [name for name in names if _inside(run, run.checkpoints / name)]


def checkpoint_folder(run: RunFolder, name: str) -> Path | None:
    """Return the folder that `best`, `last` or `step-000040` (or `40`) names, with links resolved, or `None`."""
    if step := re.fullmatch(r"(?:step-)?([0-9]{1,9})", name):
        name = run.checkpoint(int(step.group(1))).name
    path = run.checkpoints / name
    if Path(name).name != name or not (NAME.fullmatch(name) or name in ("best", "last")):
        return None
    return _inside(run, path)


def _inside(run: RunFolder, path: Path) -> Path | None:
    folder = path.resolve()
    whole = folder.parent == run.checkpoints.resolve() and NAME.fullmatch(folder.name) and folder.is_dir()
    return folder if whole else None


def _is_for_use(name: str) -> bool:
    """Return whether inference reads a checkpoint's file; the far larger states of optimizer and random numbers are for
    resuming.
    """
    return "/" not in name and not is_state_file(name) and Path(name).suffix not in (".pt", ".pth", ".bin")


def plain_model(options: Mapping[str, str], command: str) -> str | None:
    """Return the folder or hub id that a command uses without a run: `MODEL=`, or `RUN=` if that is a folder with a
    complete model.

    It is `None` for a run. Raise `UserError` for neither, or for variables that cannot be combined.
    """
    named = options.get("MODEL")
    if named is None and "RUN" not in options:
        raise UserError(
            "`RUN` is missing",
            hint=f"make {command} RUN=name-of-a-run, or make {command} MODEL=folder-or-hub-id for any model",
        )
    if named is not None and "RUN" in options:
        raise UserError("`RUN` and `MODEL` are both given", hint="give one of them")
    name = named or options["RUN"]
    folder = typed_path(name)
    of_a_run = (folder / "plan.json").is_file() or NAME.fullmatch(folder.name) or run_path(name) != Path(name)
    if named is None and (of_a_run or kind_of(folder) != "full"):
        return None
    if kind_of(folder) == "adapter" and (folder.parent / "plan.json").is_file():
        raise UserError(
            "is the adapter of a run, not a complete model",
            place=name,
            hint=f"make {command} RUN={as_typed(folder.parent)}",
        )
    if "CHECKPOINT" in options:
        raise UserError(f"`CHECKPOINT` is one of a run, and `{name}` is a model", hint="leave CHECKPOINT out")
    return name


def weight_files(folder: Path) -> list[Path]:
    """Return the files of trained weights, without optimizer states."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and not is_state_file(path.name))


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that may be published: no states, no pickles, no code, no links."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in PUBLISHED
        and path.is_file()
        and not path.is_symlink()
        and path.name not in OF_THE_CHECKPOINT
        and not is_state_file(path.name)
    )


def kind_of(folder: Path) -> Kind | None:
    """Return whether a folder contains an adapter or a full model, else `None`. Only safetensors count, by the names
    that PEFT and transformers look for; with other names they would fall back to pickles.
    """
    if (folder / "adapter_config.json").is_file():
        return "adapter" if (folder / "adapter_model.safetensors").is_file() else None
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in FULL):
        return "full"
    return None


def label_of(run: RunFolder, folder: Path) -> str:
    """Return the name of these weights: `model`, or the checkpoint's name."""
    return "model" if folder == run.model else folder.name
