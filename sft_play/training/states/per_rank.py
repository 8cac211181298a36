"""States that differ between ranks although all train the same parameters: those of local steps and PowerSGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from sft_play.runs.manifest import StatesFacts
from sft_play.training.ranks import TrainContext
from sft_play.training.slow_network import ANCHOR, AVERAGE, BASIS, ERROR, MOMENTUM, Exchange, LocalSteps, PowerSgd
from sft_play.training.states.files import Kind, Shelf

EXTRA = frozenset({ANCHOR, MOMENTUM, AVERAGE, ERROR, BASIS})
"""States of a parameter that are none of the optimizer's."""
VALUES = ("master", "weight")
"""States that are the parameter's own values, the one with more digits first."""
Add = Callable[[str, Tensor, str, Kind, int, int, tuple[int, ...]], None]


def facts_of(context: TrainContext, exchange: Exchange) -> dict[str, Any] | None:
    """Returns what `states.json` says of own states, `None` where there are none. Collective."""
    if exchange is None:
        return None
    local = exchange if isinstance(exchange, LocalSteps) else None
    return {
        "world": context.ranks.world,
        "local": local is not None,
        "window": local.window if local else 0,
        "tokens": local.counts() if local else [],
    }


def take_exchange(exchange: Exchange, add: Add, average: Mapping[str, Tensor], *, first: bool) -> None:
    """Adds this rank's pieces that are none of the optimizer's; `average`: of weights that differ between ranks, on rank 0 (`first`)."""

    def add_slice(state: str, name: str, value: Tensor) -> None:
        add(state, value.reshape(-1), name, "slice", 0, value.numel(), tuple(value.shape))

    if isinstance(exchange, LocalSteps) and first:
        for name, value in average.items():
            add_slice(AVERAGE, name, value)
        for name, anchor, velocity in zip(exchange.names, exchange.anchor, exchange.velocity, strict=True):
            add_slice(ANCHOR, name, anchor)
            add_slice(MOMENTUM, name, velocity)
    if isinstance(exchange, PowerSgd):
        for name, error in exchange.error.items():
            add_slice(ERROR, name, error)
        for name, basis in exchange.basis.items() if first else ():
            add(BASIS, basis, name, "whole", 0, basis.numel(), tuple(basis.shape))


class MeanShelf(Shelf):
    """Several ranks' own states read as one: numbers of each element are averaged, everything else is the first rank's."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves, first = tuple(shelves), shelves[0]
        self.checkpoint, self._open, self._pieces, self._values = first.checkpoint, first._open, first._pieces, first._values

    def fill(self, target: Tensor, parameter: str, state: str, start: int, end: int) -> None:
        """As `Shelf.fill`, with the mean over those ranks that have the state."""
        holding = [shelf for shelf in self.shelves if shelf.pieces(parameter, state)] or [self.shelves[0]]
        if not target.is_floating_point() or len(holding) == 1:
            holding[0].fill(target, parameter, state, start, end)
            return
        total, part = torch.zeros(target.shape, dtype=torch.float64), torch.empty(target.shape, dtype=target.dtype)
        for shelf in holding:
            shelf.fill(part, parameter, state, start, end)
            total += part
        target.copy_(total / len(holding))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where this rank's states come from."""

    values: Shelf
    order: tuple[str, ...]
    """Names of the states that are a parameter's values, the one to take first."""
    states: Shelf
    errors: Shelf
    """What PowerSGD has not sent."""
    alike: bool
    """Whether all ranks continue with the weights that they had."""


def sources_of(context: TrainContext, exchange: Exchange, checkpoint: Path, facts: StatesFacts, shelf: Shelf) -> Sources:
    """Returns the sources; `shelf` is what rank 0 wrote.

    A rank takes its own states. With another number of ranks it takes the mean of those in the checkpoint, and all then begin with the
    average's weights.
    """
    if facts.own is None:
        return Sources(values=shelf, order=VALUES, states=shelf, errors=shelf, alike=True)
    alike = facts.own["world"] == context.ranks.world and exchange is not None
    own = (
        Shelf(checkpoint, [context.ranks.rank])
        if alike
        else MeanShelf([Shelf(checkpoint, [one]) for one in range(facts.own["world"])])
    )
    different = facts.own["window"] > 0 and alike
    return Sources(
        values=own if different else shelf,
        order=VALUES if different else (AVERAGE, *VALUES),
        states=own if facts.own["local"] else shelf,
        errors=own,
        alike=alike,
    )


def restore_exchange(
    context: TrainContext, trainer: Trainer, exchange: Exchange, facts: StatesFacts, shelf: Shelf, sources: Sources
) -> None:
    """Puts back what local steps and PowerSGD keep. Call when the weights are in."""
    if isinstance(exchange, LocalSteps):
        for index, (name, parameter) in enumerate(zip(exchange.names, exchange.parameters, strict=True)):
            if not shelf.pieces(name, ANCHOR):  # of a run that had one rank until now
                exchange.anchor[index].copy_(parameter.detach())
                continue
            for state, target in ((ANCHOR, exchange.anchor[index]), (MOMENTUM, exchange.velocity[index])):
                shelf.fill(target.view(-1), name, state, 0, target.numel())
        if facts.own is not None and facts.own["local"]:
            exchange.window = int(facts.own["window"])
            exchange.tokens = int(facts.own["tokens"][context.ranks.rank]) if sources.alike else 0
    if isinstance(exchange, PowerSgd):
        for name, parameter in trainer.model.named_parameters():
            bases = shelf.pieces(name, BASIS)
            if not parameter.requires_grad or not bases:
                continue
            exchange.basis[name] = shelf.whole(bases[0]).to(context.ranks.device)
            error = torch.zeros(parameter.numel(), device=context.ranks.device)
            if sources.errors.pieces(name, ERROR):
                sources.errors.fill(error, name, ERROR, 0, error.numel())
            exchange.error[name] = error.view(parameter.shape[0], -1)
