"""Puts a checkpoint's states back into a trainer, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from sft_play.errors import CheckpointError
from sft_play.runs.states_facts import check_states, optimizer_file, random_file, read_facts
from sft_play.training.states.apart import kept_apart
from sft_play.training.states.bundles import Bundle, layout_of
from sft_play.training.states.facts import restored, set_engine, set_groups, set_scaler, set_scheduler
from sft_play.training.states.own import EXTRA, VALUES, restore_extra, sources_of
from sft_play.training.states.random_states import restore_random_states
from sft_play.training.states.shelf import Shelf, dtype_of


def restore(trainer: Any, checkpoint: Path) -> None:
    """Puts weights, optimizer, scheduler, scaler, counters and random states back. Collective.

    Call after model and optimizer are wrapped. Raises `CheckpointError` when the states do not fit.
    """
    facts = read_facts(checkpoint)
    check_states(checkpoint, strategy=trainer.plan.strategy, world_size=trainer.plan.world_size)
    layout = layout_of(trainer)
    if facts.optimizer != type(layout.optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds states of `{facts.optimizer}`, and this run's optimizer is `{type(layout.optimizer).__name__}`",
            place=str(checkpoint),
            hint="set `train.optim` (or DeepSpeed's `optimizer`) back to what it was",
        )
    shelf = Shelf(checkpoint, facts.files)
    sources = sources_of(trainer, checkpoint, facts, shelf)
    ties: Mapping[str, str] = getattr(trainer.model, "all_tied_weights_keys", None) or {}
    with torch.no_grad():
        layout.begin()
        for bundle in layout.bundles:
            _put_values(sources.values, bundle, ties, sources.order)
            state = _states(sources.states, bundle, layout.optimizer)
            if state:
                layout.optimizer.state[bundle.key] = state
        layout.finish()
        restore_extra(trainer, facts, shelf, sources)
    set_groups(layout.optimizer, facts.groups)
    set_scheduler(trainer.lr_scheduler, layout.optimizer, facts.scheduler)
    set_scaler(trainer, facts.scaler)
    set_engine(trainer, facts.engine)
    trainer.set_counters(facts.counters)
    _say_fresh(trainer, checkpoint)
    restore_random(trainer, checkpoint)


def restore_random(trainer: Any, checkpoint: Path) -> None:
    """Puts this rank's random states back."""
    step = int(checkpoint.name.rpartition("-")[2])
    restore_random_states(
        _random_states(trainer, checkpoint), trainer.args.process_index, seed=trainer.config.train.seed, step=step
    )


def _random_states(trainer: Any, checkpoint: Path) -> Path | None:
    """Returns the file of this rank's random states, in the checkpoint or in what a machine with a folder of its own keeps."""
    name = random_file(trainer.args.process_index)
    return checkpoint / name if (checkpoint / name).is_file() else kept_apart(trainer, checkpoint, name)


def _say_fresh(trainer: Any, checkpoint: Path) -> None:
    """Says which ranks have no random states to go on with. Collective."""
    missing = _random_states(trainer, checkpoint) is None
    flags = trainer._gather(torch.tensor([float(missing)], dtype=torch.float64, device=trainer._sums_on()))
    fresh = [str(rank) for rank, flag in enumerate(flags.flatten().tolist()) if flag]
    if fresh and trainer.is_world_process_zero():
        who = f"rank{'s' if len(fresh) > 1 else ''} {', '.join(fresh)}"
        print(
            f"note: {checkpoint.name} has no random states of {who}: drawn anew from `train.seed` and the step",
            file=sys.stderr,
            flush=True,
        )


def _put_values(shelf: Shelf, bundle: Bundle, ties: Mapping[str, str], order: Sequence[str]) -> None:
    for share in bundle.shares:
        target = bundle.local[share.offset : share.offset + share.end - share.start]
        state = next((one for one in order if shelf.pieces(share.name, one)), None)
        if state is not None:
            shelf.fill(target, share.name, state, share.start, share.end)
            continue
        aliases = [share.name, *(name for name, source in ties.items() if source == share.name), ties.get(share.name, share.name)]
        name = next((one for one in aliases if one in shelf.weights), None)
        if name is None:
            raise CheckpointError(
                f"the checkpoint has no values of `{share.name}`, which this run trains",
                place=str(shelf.checkpoint),
                hint="the tuning mode, the adapter or the model has changed; start a new run",
            )
        shelf.weights.fill(target, name, share.shape, share.start, share.end)


def _states(shelf: Shelf, bundle: Bundle, optimizer: Any) -> dict[str, Any]:
    """Returns the optimizer's states of a bundle, in the order in which it made them."""
    found: dict[str, Any] = {}
    labels = [share.name for share in bundle.shares]
    if not labels:  # only padding, whose states stay zero
        return found
    for label in (*labels, bundle.label):
        for name in shelf.states(label):
            if name not in found and name not in VALUES and name not in EXTRA:
                found[name] = _state(shelf, bundle, name, label, optimizer)
    for label in labels:
        for name, value in shelf.values(label).items():
            found.setdefault(name, restored(value))
    return found


def _state(shelf: Shelf, bundle: Bundle, name: str, label: str, optimizer: Any) -> Tensor:
    piece = shelf.pieces(label, name)[0]
    if piece.kind == "slice":
        target = torch.zeros(bundle.local.numel(), dtype=dtype_of(piece), device=bundle.local.device)
        for share in bundle.shares:
            shelf.fill(target[share.offset : share.offset + share.end - share.start], share.name, name, share.start, share.end)
        return bundle.wrap(target)
    if piece.kind == "rank":
        piece = next(one for one in shelf.pieces(label, name) if one.file == _own_file())
    state = shelf.whole(piece)
    if name == "step" and state.ndim == 0 and not _step_on_device(optimizer, bundle.key):
        return state
    return state.to(bundle.local.device)


def _own_file() -> str:
    return optimizer_file(distributed.get_rank() if distributed.is_initialized() else 0)


def _step_on_device(optimizer: Any, key: Tensor) -> bool:
    """Whether the optimizer counts its steps beside the parameter: torch's fused and capturable ones do."""
    for group in optimizer.param_groups:
        if any(one is key for one in group["params"]):
            return bool(group.get("fused") or group.get("capturable"))
    return any(bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups)
