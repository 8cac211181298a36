"""Gather weights, then write, sync, checksum and publish the files of a checkpoint and of `model/`."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from sft_play.errors import CheckpointError, HardwareError
from sft_play.files import disk_problem, errno_of
from sft_play.model import published
from sft_play.model.lora import publish_on_base
from sft_play.model.parallel import outline_of
from sft_play.runs.checkpoints import model_files, replace_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import describe, sync, sync_below, verify, write_part
from sft_play.text import tell
from sft_play.training.ranks import TrainContext
from sft_play.training.states import States
from sft_play.training.states.layout import storage_of, whole_shape

OF_RANK = re.compile(r"-rank(\d+)\.")
"""Part of the name of a file that one rank writes."""


@dataclass(kw_only=True, slots=True)
class Writing:
    """This rank's part of a checkpoint; on rank 0 with the weights and the trainer's state."""

    context: TrainContext
    trainer: Trainer
    step: int
    folder: Path
    states: States | None
    """`None` on ranks that do not see rank 0's folder: rank 0 writes their states."""
    weights: dict[str, Any] | None
    trainer_state: str | None
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    """Time to write and sync the files."""
    verify_seconds: float = 0.0
    """Time for checksums."""
    bytes: int = 0
    """Size of this rank's files."""
    problem: str | None = None
    """Why the files could not be written."""
    error: Exception | None = None
    """An error that the disk did not cause."""

    def run(self) -> None:
        """Write, list and sync the files; errors are stored until the ranks agree."""
        if self.states is None:
            return
        try:
            times = [time.perf_counter()]
            files = self._write()
            times.append(time.perf_counter())
            facts = describe(self.folder, files)
            self.bytes = sum(int(part["bytes"]) for part in facts.values())
            times.append(time.perf_counter())
            sync(files)
            write_part(self.folder, self.context.ranks.rank, facts)
            times.append(time.perf_counter())
            self.write_seconds = times[1] - times[0] + times[3] - times[2]
            self.verify_seconds = times[2] - times[1]
        except Exception as error:  # noqa: BLE001 - the ranks agree first, then the caller raises it
            self.problem = disk_problem(error)
            self.error = None if errno_of(error) is not None else error
        finally:
            self.weights = self.states = None  # copies may be as large as the model

    def _write(self) -> list[Path]:
        """Return the files of this rank."""
        assert self.states is not None
        self.context.run.path.stat()  # raises if the run's folder is gone, which must not be created again
        self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 created it, but a network disk may show that late
        if self.weights is None or self.trainer_state is None:
            return self.states.write(self.folder)
        write_weights(self.context, self.trainer, self.weights, self.folder)
        (self.folder / TRAINER_STATE_NAME).write_text(self.trainer_state, encoding="utf-8")
        replace(self.context.stamp, step=self.step).save(self.folder)
        written = self.states.write(self.folder)
        return [*written, *(path for path in self.folder.rglob("*") if path.is_file() and _of_rank_0(path))]


def _of_rank_0(path: Path) -> bool:
    """Return whether a file is not another rank's, which may be half-written now."""
    match = OF_RANK.search(path.name)
    return not path.name.startswith(".") and (match is None or int(match.group(1)) == 0)


def publish_model(context: TrainContext, trainer: Trainer) -> int:
    """Publish the last weights, or the best checkpoint's, as `model/`, by rename. Return their step. Collective.

    If the best checkpoint is damaged or missing, report it and use the last weights. Raise `HardwareError` if the model
    cannot be written.
    """
    run, ranks, best, step = context.run, context.ranks, None, trainer.state.global_step
    if context.config.train.load_best_model_at_end:
        choice = _best(run, trainer.state.best_global_step, step) if ranks.first else None
        best, step = ranks.broadcast(choice)
    weights = gather_weights(context, trainer, clone=False) if best is None else None
    problem: str | None = None
    if ranks.first:
        try:
            _write_model(context, trainer, run.checkpoints / best if best else None, weights, step=step)
        except Exception as error:  # safetensors and tokenizers do not raise OSError for a full disk
            shutil.rmtree(run.path / ".model.partial", ignore_errors=True)
            if errno_of(error) is None:
                raise
            problem = disk_problem(error)
    reason = ranks.first_problem(problem)
    if reason is not None:
        hint = f"the last checkpoint is intact; free some disk space, then: make resume RUN={run.typed}"
        raise HardwareError(f"the model was not written: {reason}", place=str(run.model), hint=hint)
    return int(step)


def _best(run: RunFolder, best_step: int | None, last_step: int) -> tuple[str | None, int]:
    """Return name and step of the best checkpoint; if there is none or it is damaged, (`None`, the last step)."""
    if not best_step:
        return None, last_step
    best = run.checkpoint(best_step)
    if (reason := verify(best)) is None:
        return best.name, best_step
    message = (
        f"the best checkpoint is damaged: {best.name}: {reason}; `model/` has the weights of step {last_step} instead"
    )
    tell(f"warning: {run.checkpoints}: {message}")
    return None, last_step


def _write_model(
    context: TrainContext, trainer: Trainer, best: Path | None, weights: Mapping[str, Any] | None, *, step: int
) -> None:
    """Write `model/` under a temporary name, sync it to disk, and rename it."""
    run = context.run
    partial = run.path / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if best is None:
        assert weights is not None
        write_weights(context, trainer, weights, partial)
    else:
        for path in model_files(best):  # without the states for resuming
            shutil.copy2(path, partial / path.name)
        published.copy_code(_model_of(trainer), partial)  # not the checkpoint's code, which may come from elsewhere
        if not any(partial.glob("*.safetensors")):
            raise CheckpointError("the best checkpoint contains no weights", place=str(best))
    replace(context.stamp, step=step).save(partial)
    sync_below(partial)
    replace_folder(run.model, partial)


# Gathering weights is a collective; writing them is not, so a full disk on rank 0 keeps no other rank waiting. The
# files have the same form under every strategy: complete, as safetensors that any tool loads, with configuration,
# tokenizer and template.


def gather_weights(context: TrainContext, trainer: Trainer, *, clone: bool) -> dict[str, Any] | None:
    """Return the complete model's state dict on rank 0, `None` on the others. Collective.

    With `clone`, tensors that training will change are copied to host memory, so that they can be written meanwhile.
    """
    whole = _whole_state(context, trainer)
    if not context.ranks.first:
        return None
    return _copy_changing(whole, trainer.model) if clone else whole


def write_weights(context: TrainContext, trainer: Trainer, weights: Mapping[str, Any], folder: Path) -> None:
    """Write weights, configuration and tokenizer into `folder`, on rank 0, maybe in a thread. Raise `OSError`."""
    model = _model_of(trainer)
    model.save_pretrained(str(folder), state_dict=dict(weights))
    publish_on_base(model, folder)
    trainer.processing_class.save_pretrained(str(folder))
    published.copy_code(model, folder)
    if context.config.tuning.mode == "full":
        published.complete(model, trainer.processing_class, folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form, with paths of this machine
    published.let_all_read(folder)


def _model_of(trainer: Trainer) -> Any:
    """Return the model that writes its own files, without the engine's wrappers."""
    return outline_of(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))


def predicted_bytes(trainer: Trainer) -> int:
    """Return the size of the weights that `write_weights` will write: all trained parameters."""
    return sum(math.prod(whole_shape(p)) * p.element_size() for p in trainer.model.parameters() if p.requires_grad)


def _whole_state(context: TrainContext, trainer: Trainer) -> dict[str, Any]:
    adapters_only = context.config.tuning.mode != "full"
    if trainer.is_fsdp_enabled and trainer.parts is None:
        # accelerate's own `get_state_dict` would gather a frozen base too, at every save, to write only the adapters.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters_only)
        return _once(get_model_state_dict(trainer.model, options=options), trainer.model)
    if trainer.is_deepspeed_enabled:
        if context.plan.strategy == "zero3" and adapters_only:
            return trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        return _once(trainer.accelerator.get_state_dict(trainer.deepspeed) or {}, trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if trainer.parts is None:
        return model.state_dict()
    return trainer.parts.whole_state(
        {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or not adapters_only
        }
    )


def _once(whole: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return a gathered state without second copies of tied weights, such as a head that is the embedding."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: value for name, value in whole.items() if name not in tied}


def _copy_changing(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return `state` with copies of the tensors that may change; tensors that share memory share their copy.

    Frozen parameters never change, and gathered tensors are copies already. Tied weights must stay tied, because they
    are written once.
    """
    frozen = {storage_of(p) for p in model.parameters() if not p.requires_grad}
    living = {storage_of(p) for p in (*model.parameters(), *model.buffers())}
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied: dict[str, Any] = {}
    for name, value in state.items():
        if not torch.is_tensor(value) or storage_of(value) not in living - frozen:
            copied[name] = value
            continue
        key = (storage_of(value), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        copied[name] = copies[key]
    return copied
