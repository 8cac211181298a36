"""Files of a checkpoint and of `model/` on their way to the disk: weights gathered, written, synced, listed with checksums, published."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.trainer import TRAINER_STATE_NAME

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, HardwareError
from sft_play.files import append_json_line, read_json, sync_folder, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import damage, describe, sync, sync_below, verify, write_part
from sft_play.runs.space import describe as describe_problem
from sft_play.runs.space import errno_of
from sft_play.runs.stamp import Stamp
from sft_play.runs.weights import model_files
from sft_play.training.holdings import local_part
from sft_play.training.ranks import from_rank_0
from sft_play.training.states import States
from sft_play.training.states.per_rank import seal_own

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer


OF_RANK = re.compile(r"-rank(\d+)\.")
"""In the name of a file that one rank writes."""


@dataclass(kw_only=True, slots=True)
class Writing:
    """This rank's part of a checkpoint. Rank 0 writes the weights and the trainer's state too."""

    step: int
    folder: Path
    rank: int
    states: States | None
    weights: dict[str, Any] | None
    trainer_state: str | None
    best: bool
    """Whether this step's evaluation was the best so far."""
    background: bool
    apart: bool = False
    """Whether this rank does not see rank 0's folder: what it writes stays beside its own, with a manifest of its own."""
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    """Until everything was on the disk."""
    verify_seconds: float = 0.0
    """For checksums, and for comparing with them."""
    bytes: int = 0
    """Of this rank's files."""
    problem: str | None = None
    """Why the disk did not take them, or gave back something else."""
    error: Exception | None = None
    """What was no disk's fault."""
    thread: threading.Thread | None = field(default=None, repr=False)

    def start(self, trainer: SftTrainer) -> None:
        """Begins in a thread that does not keep the process alive."""
        self.thread = threading.Thread(target=self.run, args=(trainer,), name=f"save-{self.step}", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Returns when the thread has ended."""
        if self.thread is not None:
            self.thread.join()

    def run(self, trainer: SftTrainer) -> None:
        """Writes, syncs, lists and reads back; what goes wrong is kept for when the ranks agree."""
        try:
            times = [time.perf_counter()]
            files = self._write(trainer)
            times.append(time.perf_counter())
            facts = describe(self.folder, files)
            self.bytes = sum(int(one["bytes"]) for one in facts.values())
            times.append(time.perf_counter())
            sync(files)
            times.append(time.perf_counter())
            self.problem = damage(self.folder, facts, from_disk=self.background)  # in a thread it keeps no step waiting
            if not self.apart:
                write_part(self.folder, self.rank, facts)
            elif self.problem is None:
                seal_own(self.folder, self.rank, facts)
            times.append(time.perf_counter())
            self.write_seconds = times[1] - times[0] + times[3] - times[2]
            self.verify_seconds = times[2] - times[1] + times[4] - times[3]
        except Exception as error:  # noqa: BLE001 - raised by the caller where it is no disk's fault; the ranks agree first
            self.problem = describe_problem(error)
            self.error = None if errno_of(error) is not None else error
        finally:
            self.weights = self.states = None  # copies may be as large as the model

    def _write(self, trainer: SftTrainer) -> list[Path]:
        """Returns the files of this rank."""
        assert self.states is not None
        trainer.run.path.stat()  # raises where the run's folder is gone: it is not made anew
        self.folder.mkdir(
            parents=True, exist_ok=True
        )  # rank 0 made it; on a network disk, or another machine's own, it is not there
        if self.weights is None or self.trainer_state is None:
            return self.states.write(self.folder)
        from sft_play.training.trainer import stamp_at

        write_weights(trainer, self.weights, self.folder)
        (self.folder / TRAINER_STATE_NAME).write_text(self.trainer_state, encoding="utf-8")
        stamp_at(trainer.stamp, self.step).save(self.folder)
        written = self.states.write(self.folder)
        return [*written, *(path for path in self.folder.rglob("*") if path.is_file() and _of_rank_0(path))]


class DiskCheck:
    """Compares a published checkpoint with its manifest once more, from the disk, in a thread of rank 0.

    Reading a disk takes about as long as writing it, so training does not wait for it; what is older stays until it is done.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.damage: str | None = "it was not read to its end"
        self._thread = threading.Thread(target=self._run, name=f"check-{checkpoint.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.damage = verify(self.checkpoint, from_disk=True)
        except Exception as error:  # noqa: BLE001 - of a thread nobody hears it: what was not compared must not count as whole
            self.damage = f"it could not be read: {str(error) or type(error).__name__}"

    def ended(self, *, wait_seconds: float = 0.0) -> bool:
        """Whether `damage` is known, after `wait_seconds` at most."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()


def _of_rank_0(path: Path) -> bool:
    """Whether a file is not another rank's, which may be half-written now."""
    match = OF_RANK.search(path.name)
    return not path.name.startswith(".") and (match is None or int(match.group(1)) == 0)


# `model/`, the result of a run: the last weights, or the best checkpoint's once they have been compared with their manifest.


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
            problem = describe_problem(error)
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


# The weights of a checkpoint or a published model: gathered over the ranks first, written by rank 0 afterwards.
#
# Gathering is a collective operation; writing is none, so a disk that is full on rank 0 keeps no other rank waiting. The files have one
# form under every strategy: whole, as safetensors that any tool loads, with configuration, tokenizer and template.


def gather_weights(trainer: SftTrainer, *, clone: bool) -> dict[str, Any] | None:
    """Returns the whole model's state dict on rank 0, `None` on the others. Collective.

    With `clone` what training goes on to change is copied to host memory, so that it can be written meanwhile.
    """
    whole = _whole_state(trainer)
    if not trainer.is_world_process_zero():
        return None
    return _copied(whole, trainer.model) if clone else whole


def write_weights(trainer: SftTrainer, weights: Mapping[str, Any], folder: Path) -> None:
    """Writes weights, configuration and tokenizer into `folder`. Rank 0 alone; may run in a thread. Raises `OSError`."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model.save_pretrained(str(folder), state_dict=dict(weights))
    trainer.processing_class.save_pretrained(str(folder))
    write_text(folder / "README.md", model_card(trainer.stamp, trainer.run.name))
    usual = next(folder.glob("*.json")).stat().st_mode
    for path in folder.glob("*model*.safetensors"):
        path.chmod(usual & 0o777)  # safetensors writes aside, for its owner alone


def model_card(stamp: Stamp, run: str) -> str:
    """Returns what a person who finds the folder must know, in place of PEFT's empty form; no path of this machine."""
    local = stamp.base_model.startswith((".", "/", "~")) or stamp.base_model.count("/") != 1 or Path(stamp.base_model).exists()
    base = Path(stamp.base_model).name if local else stamp.base_model
    adapter = stamp.mode != "full"
    facts = "" if local else f"base_model: {base}\n"
    lora = f", rank {stamp.lora['r']}, alpha {stamp.lora['alpha']:g}" if stamp.lora else ""
    return (
        f"---\n{facts}library_name: {'peft' if adapter else 'transformers'}\npipeline_tag: text-generation\ntags: [sft-play]\n---\n\n"
        f"# {run}\n\n{'LoRA adapters over' if adapter else 'All weights, tuned from'} `{base}`, trained by SFT-Play: {stamp.mode}{lora}, "
        f"rows of up to {stamp.max_seq_len} tokens, {stamp.global_batch_size} rows a step, {stamp.precision}, seed {stamp.seed}.\n\n"
        f"Try it: `make infer RUN={run}`. `stamp.json` says all that made it.\n"
    )


def predicted_bytes(trainer: SftTrainer) -> int:
    """Returns the size of the weights that `write_weights` will write: what is trained, or the whole of a fully tuned model."""
    chosen = [p for p in trainer.model.parameters() if p.requires_grad]
    return sum(int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in chosen)


def _whole_state(trainer: SftTrainer) -> dict[str, Any]:
    if trainer.is_fsdp_enabled:
        # accelerate's own `get_state_dict` would gather a frozen base too, at every save; adapters alone are written.
        frozen = trainer.config.tuning.mode != "full"
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=frozen)
        whole = get_model_state_dict(trainer.model, options=options)
        tied = getattr(trainer.model, "all_tied_weights_keys", {})  # gathered twice: the head and the embedding that it is
        return {name: value for name, value in whole.items() if name not in tied}
    if trainer.is_deepspeed_enabled:
        if trainer.plan.strategy == "zero3" and trainer.config.tuning.mode != "full":
            return trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        return trainer.accelerator.get_state_dict(trainer.deepspeed)
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False).state_dict()


def _copied(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Returns `state` with every tensor that may change copied, those that share memory sharing their copy.

    Frozen parameters never change, and what was gathered is a copy already. Tied weights must stay tied: they are written once.
    """
    frozen = {_address(p) for p in model.parameters() if not p.requires_grad}
    living = {_address(p) for p in (*model.parameters(), *model.buffers())}
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied: dict[str, Any] = {}
    for name, value in state.items():
        if not torch.is_tensor(value) or _address(value) not in living - frozen:
            copied[name] = value
            continue
        key = (_address(value), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        copied[name] = copies[key]
    return copied


def _address(tensor: Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())  # a DTensor's own storage has none
