"""`model/`, the result of a run: the last weights, or the best checkpoint's once they have been compared with their manifest."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, HardwareError
from sft_play.files import append_json_line, read_json, sync_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import sync_below, verify
from sft_play.runs.space import describe, errno_of
from sft_play.runs.weights import model_files
from sft_play.training.ranks import from_rank_0
from sft_play.training.weights_out import gather_weights, write_weights

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Whose weights become `model/`."""

    checkpoint: Path | None
    """`None` for the weights in memory, those of the last step."""
    lost: tuple[str, ...] = ()
    """Why better ones could not be taken."""


def choose(run: RunFolder, best_step: int | None) -> Choice:
    """Returns the best checkpoint, the first that is whole of the best step's and of the one that `best` names; else the last weights."""
    named = run.checkpoints / run.best.readlink() if run.best.is_symlink() else run.best if run.best.is_dir() else None
    candidates = [run.checkpoint(best_step)] if best_step else []
    candidates += [named] if named is not None and named not in candidates else []
    lost: list[str] = []
    for checkpoint in candidates:
        reason = verify(checkpoint)
        if reason is None:
            return Choice(checkpoint=checkpoint, lost=tuple(lost))
        lost.append(f"{checkpoint.name}: {reason}")
    return Choice(checkpoint=None, lost=tuple(lost))


def publish_model(run: RunFolder, trainer: SftTrainer, config: Config) -> int:
    """Publishes the last weights, or the best checkpoint's, as `model/`, by rename. Returns their step. Collective.

    Where the best checkpoint is damaged or gone this is said, and the next best that is whole is taken. Raises `HardwareError` where
    the model cannot be written.
    """
    best, step = _agreed_choice(run, trainer) if config.train.load_best_model_at_end else (None, trainer.state.global_step)
    weights = gather_weights(trainer, clone=False) if best is None else None
    problem: str | None = None
    if trainer.is_world_process_zero():
        try:
            write_model(run, trainer, best, weights, step=step)
        except Exception as error:  # what safetensors and tokenizers raise for a full disk is no OSError
            shutil.rmtree(run.path / ".model.partial", ignore_errors=True)
            if errno_of(error) is None:
                raise
            problem = describe(error)
    reason = trainer.saver.agreed(problem)
    if reason is not None:
        hint = f"the last checkpoint is as it was; make room, then: make resume RUN={run.name}"
        raise HardwareError(f"the model was not written: {reason}", place=str(run.model), hint=hint)
    return step


def _agreed_choice(run: RunFolder, trainer: SftTrainer) -> tuple[Path | None, int]:
    """Returns rank 0's choice and its step, the same on every rank. Collective."""
    found: tuple[str | None, int] | None = None
    if trainer.is_world_process_zero():
        choice = choose(run, trainer.state.best_global_step)
        step = (
            trainer.state.global_step
            if choice.checkpoint is None
            else int(read_json(choice.checkpoint / "trainer_state.json")["global_step"])
        )
        if choice.lost:
            _warn(run, choice, step)
        found = (choice.checkpoint.name if choice.checkpoint else None, step)
    name, step = from_rank_0(found)
    return run.checkpoints / name if name else None, int(step)


def _warn(run: RunFolder, choice: Choice, step: int) -> None:
    reason = "; ".join(choice.lost)
    print(
        f"warning: {run.checkpoints}: the best checkpoint cannot be trusted: {reason}; `model/` has the weights of step {step} instead",
        file=sys.stderr,
        flush=True,
    )
    append_json_line(run.events, {"event": "best_lost", "time": time.time(), "node": 0, "reason": reason, "model_step": step})


def write_model(run: RunFolder, trainer: SftTrainer, best: Path | None, weights: Mapping[str, Any] | None, *, step: int) -> None:
    """Writes `model/` aside, syncs it to the disk, and gives it its name."""
    from sft_play.training.trainer import stamp_at

    partial, replaced = run.path / ".model.partial", run.path / ".model.replaced"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if best is None:
        assert weights is not None
        write_weights(trainer, weights, partial)
    else:
        copy_weights(best, partial)
    stamp_at(trainer.stamp, step).save(partial)
    sync_below(partial)
    shutil.rmtree(replaced, ignore_errors=True)
    if run.model.exists():  # a run that was made longer
        run.model.rename(replaced)
    partial.rename(run.model)
    sync_folder(run.path)
    shutil.rmtree(replaced, ignore_errors=True)


def copy_weights(checkpoint: Path, folder: Path) -> None:
    """Copies weights, configuration and tokenizer of a checkpoint; the states for resuming stay behind."""
    for path in model_files(checkpoint):
        shutil.copy2(path, folder / path.name)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError("the best checkpoint holds no weights", place=str(checkpoint))
