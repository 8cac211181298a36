"""Collect every state of a run other than weights, write it without pickle, restore it on any number of ranks (ADR 7).

- `layout`: where each strategy keeps parameters and their optimizer states; `facts`: states of a few numbers;
- `files`: which file holds which range of which parameter, and the states that differ between ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.core_model_loading import revert_weight_conversion

from sft_play.errors import CheckpointError
from sft_play.runs.manifest import (
    FORMAT,
    STATES_NAME,
    StatesFacts,
    check_states,
    optimizer_file,
    random_file,
    read_facts,
)
from sft_play.training.ranks import Ranks, TrainContext, outline
from sft_play.training.slow_network import ANCHOR, AVERAGE, MOMENTUM, LocalSteps
from sft_play.training.states.facts import (
    ELEMENTWISE,
    engine_of,
    from_plain,
    groups_of,
    random_states,
    restore_random,
    scaler_of,
    scheduler_of,
    set_engine,
    set_groups,
    set_scaler,
    set_scheduler,
    to_plain,
)
from sft_play.training.states.files import (
    INDEX,
    Kind,
    Share,
    StateFiles,
    StatePiece,
    readable,
    write_tensors,
)
from sft_play.training.states.layout import Bundle, layout_of, whole_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """The states that one rank writes, in CPU memory, so that any thread can write them."""

    files: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]
    """Name -> tensors and metadata: this rank's, and on rank 0 those of ranks that do not see its folder."""
    facts: StatesFacts | None
    """Only on rank 0."""

    def write(self, folder: Path) -> list[Path]:
        """Write and return the files; not collective. Raise `OSError`."""
        for name, (tensors, metadata) in self.files.items():
            write_tensors(folder / name, tensors, metadata)
        written = [folder / name for name in self.files]
        if self.facts is not None:
            written.append(folder / STATES_NAME)
            written[-1].write_text(json.dumps(asdict(self.facts), indent=2) + "\n", encoding="utf-8")
        return written


def collect(
    context: TrainContext,
    trainer: Trainer,
    local: LocalSteps | None,
    counters: dict[str, Any],
    *,
    clone: bool,
    average: Mapping[str, Tensor],
) -> States:
    """Return this rank's states after an optimizer step. Collective: all ranks call it together.

    With `clone` they share no memory with the trainer, which may continue while they are written. `average` holds, on
    rank 0, the average of each trained parameter if weights differ between ranks. Raise `CheckpointError` for a state
    that cannot be saved (an object that is neither tensor nor number).
    """
    layout, ranks = layout_of(trainer), context.ranks
    apart = local is not None and local.window > 0
    collector = _Collector(clone, frozenset() if apart else in_weights_file(context, trainer))
    files = {random_file(ranks.rank): random_states()}
    own = None if local is None else {"window": local.window, "tokens": local.counts()}
    if layout.sharded or ranks.first or local is not None:
        for bundle in layout.bundles:
            collector.take(bundle, layout.optimizer.state.get(bundle.key, {}))
        if ranks.first and local is not None:
            averages = ((AVERAGE, name, value) for name, value in average.items())
            for state, name, value in (*averages, *local.states()):
                collector.add(state, value.reshape(-1), Share.complete(name, tuple(value.shape)), "slice")
        index = {"pieces": [piece.facts() for piece in collector.pieces], "values": collector.values}
        files[optimizer_file(ranks.rank)] = collector.tensors, {INDEX: json.dumps(index)}
    if not ranks.first:
        return States(files=files, facts=None)
    name = type(layout.optimizer).__name__
    facts = StatesFacts(
        format=FORMAT,
        strategy=context.plan.strategy,
        world_size=ranks.world,
        optimizer=name,
        reshardable=name in ELEMENTWISE and all(piece.kind != "rank" for piece in collector.pieces),
        files=ranks.world if layout.sharded else 1,
        groups=groups_of(layout.optimizer),
        scheduler=scheduler_of(trainer.lr_scheduler, layout.optimizer),
        scaler=scaler_of(trainer),
        engine=engine_of(trainer),
        counters=counters,
        own=own,
    )
    return States(files=files, facts=facts)


def bring_together(ranks: Ranks, states: States, together: Collection[int]) -> States | None:
    """Send rank 0 the states of ranks outside `together`, which do not see its folder; return what each rank writes.

    Collective.
    """
    away = ranks.rank not in together
    mine = [[name, outline(tensors), metadata] for name, (tensors, metadata) in states.files.items()] if away else []
    files = dict(states.files)
    for rank, sent in enumerate(ranks.gather(mine)):
        for name, there, metadata in sent:
            if ranks.rank == rank:
                ranks.send(states.files[name][0])
            elif ranks.first:
                files[name] = ranks.receive(rank, there), metadata
    return None if away else replace(states, files=files)


EXTRA = frozenset({ANCHOR, MOMENTUM, AVERAGE})
"""States of a parameter that do not belong to the optimizer."""
VALUES = ("master", "weight")
"""States that are the parameter's own values, the more precise first."""


class _Collector:
    """Collect pieces, bundle by bundle."""

    def __init__(self, clone: bool, in_weights: frozenset[str]) -> None:
        self.clone, self.in_weights = clone, in_weights
        self.pieces: list[StatePiece] = []
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, dict[str, Any]] = {}

    def take(self, bundle: Bundle, states: Mapping[str, Any]) -> None:
        """Add a bundle's values that the weights' file lacks, and all its states."""
        for share in bundle.shares:
            if bundle.master or share.name not in self.in_weights:
                self._slice("master" if bundle.master else "weight", bundle.local, share)
        for name, state in states.items() if bundle.shares else ():
            flat = bundle.unwrap(state) if isinstance(state, Tensor) and name != "step" else None
            if flat is not None:
                for share in bundle.shares:
                    self._slice(name, flat, share)
            elif not isinstance(state, Tensor) or hasattr(state, "__tensor_flatten__"):
                for share in bundle.shares:  # a number; anything else raises
                    self.values.setdefault(share.name, {})[name] = to_plain(state, name)
            elif state.numel() == 1 or [share.elements for share in bundle.shares] == [
                math.prod(bundle.shares[0].shape)
            ]:
                for share in bundle.shares:
                    self.add(name, state, Share.complete(share.name, share.shape), "whole")
            else:
                self.add(name, state, Share.complete(bundle.label, tuple(state.shape)), "rank")

    def _slice(self, name: str, flat: Tensor, share: Share) -> None:
        part = flat[share.offset : share.offset + share.elements]
        if share.columns:
            self.add(name, part.view(share.shape[0], -1), share, "columns")
        else:
            self.add(name, part, share, "slice")

    def add(self, state: str, tensor: Tensor, share: Share, kind: Kind) -> None:
        """Add one piece."""
        values = tensor.detach().to("cpu", copy=self.clone).contiguous()
        key = f"{state}/{share.name}"
        self.tensors[key] = values
        self.pieces.append(
            StatePiece(
                key=key,
                parameter=share.name,
                state=state,
                kind=kind,
                start=share.start,
                end=share.end,
                shape=share.shape,
                dtype=str(values.dtype).removeprefix("torch."),
            )
        )


def in_weights_file(context: TrainContext, trainer: Trainer) -> frozenset[str]:
    """Return the trainable parameters that a checkpoint's weights hold under their own name and shape.

    An adapter's file has shorter names, and for some models transformers writes the hub's original names and shapes.
    """
    if context.config.tuning.mode != "full":
        return frozenset()
    shapes = {name: whole_shape(parameter) for name, parameter in trainer.model.named_parameters()}
    written = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        written = revert_weight_conversion(trainer.model, written)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError):
        return frozenset()  # then all values are saved as pieces, which need no such conversion
    skipped = frozenset(getattr(trainer.model, "_keys_to_ignore_on_save", None) or ())
    return frozenset(name for name, value in written.items() if shapes.get(name) == tuple(value.shape)) - skipped


def restore(context: TrainContext, trainer: Trainer, local: LocalSteps | None, checkpoint: Path) -> Mapping[str, Any]:
    """Restore weights, optimizer, scheduler, scaler and random states; return the counters. Collective.

    Call after model and optimizer are wrapped. Raise `CheckpointError` if the states do not fit.
    """
    facts = read_facts(checkpoint)
    check_states(checkpoint, strategy=context.plan.strategy, world_size=context.plan.world_size)
    layout = layout_of(trainer)
    if facts.optimizer != type(layout.optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint contains states of `{facts.optimizer}`, and this run's optimizer is"
            f" `{type(layout.optimizer).__name__}`",
            place=str(checkpoint),
            hint="set `train.optim` (or DeepSpeed's `optimizer`) back to what it was",
        )
    ties: Mapping[str, str] = getattr(trainer.model, "all_tied_weights_keys", None) or {}
    with torch.no_grad(), readable(checkpoint):
        written = mine = StateFiles(checkpoint, range(facts.files))
        alike = facts.own is None or (facts.world_size == context.ranks.world and local is not None)
        if facts.own is not None:
            # A rank restores its own states; in another number of ranks each starts from the mean.
            ranks = [context.ranks.rank] if alike else range(facts.world_size)
            mine = StateFiles(checkpoint, ranks, mean=not alike)
        layout.begin()
        for bundle in layout.bundles:
            _put_values(mine if alike else written, bundle, ties, VALUES if alike else (AVERAGE, *VALUES))
            state = _states(mine, bundle, layout.optimizer, optimizer_file(context.ranks.rank))
            if state:
                layout.optimizer.state[bundle.key] = state
        layout.finish()
        if local is not None:
            for anchor, weights in zip(local.anchor, local.parameters, strict=True):
                anchor.copy_(weights)  # for a run that had a single rank until now
            for name, parameter, values in local.states():
                if written.pieces(parameter, name):
                    written.fill(values.view(-1), parameter, name, 0, values.numel())
            if facts.own is not None:
                local.window = int(facts.own["window"])
                local.tokens = float(facts.own["tokens"][context.ranks.rank]) if alike else 0.0
    set_groups(layout.optimizer, facts.groups)
    set_scheduler(trainer.lr_scheduler, layout.optimizer, facts.scheduler)
    set_scaler(trainer, facts.scaler)
    set_engine(trainer, facts.engine)
    restore_random(context, checkpoint)
    return facts.counters


def _put_values(state_files: StateFiles, bundle: Bundle, ties: Mapping[str, str], order: Sequence[str]) -> None:
    for share in bundle.shares:
        target = bundle.local[share.offset : share.offset + share.elements]
        state = next((candidate for candidate in order if state_files.pieces(share.name, candidate)), None)
        if state is not None:
            _fill(share, target, partial(state_files.fill, parameter=share.name, state=state))
            continue
        aliases = [
            share.name,
            *(name for name, source in ties.items() if source == share.name),
            ties.get(share.name, share.name),
        ]
        pieces = next(filter(None, map(state_files.weight, aliases)), [])
        if not pieces or pieces[0].shape != share.shape:
            raise CheckpointError(
                f"the checkpoint has no values of `{share.name}`, which this run trains, in the shape"
                f" {list(share.shape)}",
                place=str(state_files.checkpoint),
                hint="the tuning mode, the adapter or the model has changed; start a new run",
            )
        _fill(share, target, partial(state_files.fill_from, pieces, what=f"`{share.name}`"))


ROWS_AT_ONCE = 1024


def _fill(share: Share, target: Tensor, read: Callable[..., None]) -> None:
    """Fill the elements of a share; `read` fills a tensor with a range of the complete parameter."""
    if not share.columns:
        read(target, start=share.start, end=share.end)
        return
    rows, width = share.shape[0], math.prod(share.shape[1:])
    mine = target.view(rows, -1)
    for first in range(0, rows, ROWS_AT_ONCE):
        last = min(rows, first + ROWS_AT_ONCE)
        block = torch.empty((last - first) * width, dtype=target.dtype)
        read(block, start=first * width, end=last * width)
        mine[first:last].copy_(block.view(last - first, width)[:, share.start : share.end])


def _states(state_files: StateFiles, bundle: Bundle, optimizer: Any, own_file: str) -> dict[str, Any]:
    """Return the optimizer's states of a bundle, in the order in which the optimizer created them."""
    states: dict[str, Any] = {}
    labels = [share.name for share in bundle.shares]
    if not labels:  # the bundle is only padding, whose states stay zero
        return states
    for label in (*labels, bundle.label):
        for name in state_files.states(label):
            if name not in states and name not in VALUES and name not in EXTRA:
                states[name] = _state(state_files, bundle, name, label, optimizer, own_file)
    for label in labels:
        for name, value in state_files.values(label).items():
            states.setdefault(name, from_plain(value))
    return states


def _state(state_files: StateFiles, bundle: Bundle, name: str, label: str, optimizer: Any, own_file: str) -> Tensor:
    piece = state_files.pieces(label, name)[0]
    if piece.kind in ("slice", "columns"):
        target = torch.zeros(bundle.local.numel(), dtype=getattr(torch, piece.dtype), device=bundle.local.device)
        for share in bundle.shares:
            part = target[share.offset : share.offset + share.elements]
            _fill(share, part, partial(state_files.fill, parameter=share.name, state=name))
        return bundle.wrap(target)
    if piece.kind == "rank":
        piece = next(own_piece for own_piece in state_files.pieces(label, name) if own_piece.file == own_file)
    state = state_files.whole(piece)
    if name == "step" and state.ndim == 0 and not _step_on_device(optimizer, bundle.key):
        return state
    return state.to(bundle.local.device)


def _step_on_device(optimizer: Any, key: Tensor) -> bool:
    """Return whether the optimizer counts steps on the parameter's device, as torch's fused and capturable ones do."""
    mine = [group for group in optimizer.param_groups if any(parameter is key for parameter in group["params"])]
    return any(group.get("fused") or group.get("capturable") for group in mine or optimizer.param_groups)
