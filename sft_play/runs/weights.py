"""Which folder of a run holds the weights that a command wants: the final model or a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sft_play.errors import CheckpointError, UserError
from sft_play.runs.folder import RunFolder, run_path
from sft_play.runs.manifest import is_state_file, verify

Kind = Literal["adapter", "full"]

FULL = ("model.safetensors", "model.safetensors.index.json")
PUBLISHED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md")
OF_THE_CHECKPOINT = frozenset({"trainer_state.json", "manifest.json", "stamp.json", "states.json"})
STEP_NAME = re.compile(r"step-[0-9]{1,9}")


def weights_folder(run: RunFolder, wanted: str | None) -> Path:
    """Returns the folder that `CHECKPOINT=` names (`best`, `last`, `step-000040`), links followed.

    Without a name it is the final model, or the last checkpoint of a run that has not finished. A checkpoint's weights are
    compared with its manifest first. Raises `CheckpointError` with what exists, or with the file that is damaged.
    """
    if wanted is None and kind_of(run.model):
        return run.model
    if folder := checkpoint_folder(run, wanted or "last"):
        damage = verify(folder, needed=_is_for_use)
        if damage:
            hint = "CHECKPOINT= takes another one, and `make resume` goes on from the newest that is whole"
            raise CheckpointError(f"the checkpoint is damaged: {damage}", place=str(folder), hint=hint)
        return folder
    known = checkpoint_names(run)
    what = f"no checkpoint `{wanted}`" if wanted else "neither a final model nor a checkpoint yet"
    raise CheckpointError(
        f"the run `{run.name}` has {what}",
        hint=f"CHECKPOINT= takes {', '.join(known)}" if known else "wait for its first checkpoint, or train it again",
    )


def checkpoint_names(run: RunFolder) -> list[str]:
    """Returns the names by which checkpoints of a run can be had: `best` and `last` where they lead to one, then those of the steps."""
    names = [
        *(link.name for link in (run.best, run.last) if _inside(run, link)),
        *sorted(p.name for p in run.checkpoints.glob("step-*")),
    ]
    return [name for name in names if _inside(run, run.checkpoints / name)]


def checkpoint_folder(run: RunFolder, name: str) -> Path | None:
    """Returns the folder that `best`, `last` or `step-000040` (or `40`) names, links followed; `None` where there is none.

    `last` and `best` are links, and those of a stranger's run may lead anywhere. Raises `CheckpointError` for one that leaves the run.
    """
    if step := re.fullmatch(r"(?:step-)?([0-9]{1,9})", name):
        name = run.checkpoint(int(step.group(1))).name
    path = run.checkpoints / name
    if Path(name).name != name or not (STEP_NAME.fullmatch(name) or name in ("best", "last")):
        return None
    if folder := _inside(run, path):
        return folder
    if path.is_symlink():
        known = [one for one in checkpoint_names(run) if one != name]
        raise CheckpointError(
            f"is a link to `{path.readlink()}`, which is no checkpoint of the run `{run.name}`",
            place=str(path),
            hint=f"there are {', '.join(known)}; `make resume` points `last` at what it saves"
            if known
            else "the run has no checkpoint",
        )
    return None


def _inside(run: RunFolder, path: Path) -> Path | None:
    folder = path.resolve()
    whole = folder.parent == run.checkpoints.resolve() and STEP_NAME.fullmatch(folder.name) and folder.is_dir()
    return folder if whole else None


def _is_for_use(name: str) -> bool:
    """Whether a checkpoint's file is read to answer; states of optimizer and random numbers, far larger, are for resuming."""
    return "/" not in name and not is_state_file(name) and Path(name).suffix not in (".pt", ".pth", ".bin")


def plain_model(options: Mapping[str, str], command: str) -> str | None:
    """Returns the folder or hub id that a command uses without a run: `MODEL=`, or `RUN=` where that is a folder with a whole model.

    `None` for a run. Raises `UserError` for neither, or for variables that do not go together.
    """
    named = options.get("MODEL")
    if named is None and "RUN" not in options:
        raise UserError(
            "`RUN` is missing", hint=f"make {command} RUN=name-of-a-run, or make {command} MODEL=folder-or-hub-id for any model"
        )
    if named is not None and "RUN" in options:
        raise UserError("`RUN` and `MODEL` are both given", hint="give one of them")
    name = named or options["RUN"]
    folder = Path(name).expanduser()
    of_a_run = (folder / "plan.json").is_file() or STEP_NAME.fullmatch(folder.name) or run_path(name) != Path(name)
    if named is None and (of_a_run or kind_of(folder) != "full"):
        return None
    if kind_of(folder) == "adapter" and (folder.parent / "plan.json").is_file():
        raise UserError("is the adapter of a run, not a whole model", place=name, hint=f"make {command} RUN={folder.parent}")
    if "CHECKPOINT" in options:
        raise UserError(f"`CHECKPOINT` is one of a run, and `{name}` is a model", hint="leave CHECKPOINT out")
    return name


def model_files(folder: Path) -> list[Path]:
    """Returns the files of trained weights that may be copied to what is published: no states, no pickles, no code, no links."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in PUBLISHED and path.is_file() and not path.is_symlink() and path.name not in OF_THE_CHECKPOINT
        and not is_state_file(path.name)
    )  # fmt: skip


def kind_of(folder: Path) -> Kind | None:
    """Returns what a folder holds: an adapter, a full model, or neither. Only safetensors count, and only by the names under which
    PEFT and transformers look for them: beside others they would fall back to pickles."""
    if (folder / "adapter_config.json").is_file():
        return "adapter" if (folder / "adapter_model.safetensors").is_file() else None
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in FULL):
        return "full"
    return None


def label_of(run: RunFolder, folder: Path) -> str:
    """Returns what to call these weights: `model`, or the checkpoint's name."""
    return "model" if folder == run.model else folder.name
