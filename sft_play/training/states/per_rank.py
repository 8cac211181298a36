"""States that differ between ranks although all train the same parameters, and those of ranks that do not see rank 0's folder."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft_play.files import read_json
from sft_play.runs.manifest import Facts, StatesFacts, damage, optimizer_file, write_part
from sft_play.training.compression import BASIS, ERROR
from sft_play.training.local_steps import ANCHOR, AVERAGE, MOMENTUM
from sft_play.training.states.files import Kind, Piece, Shelf

EXTRA = frozenset({ANCHOR, MOMENTUM, AVERAGE, ERROR, BASIS})
"""States of a parameter that are none of the optimizer's."""
VALUES = ("master", "weight")
"""States that are the parameter's own values, the one with more digits first."""
Add = Callable[[str, Tensor, str, Kind, int, int, tuple[int, ...]], None]


def has_own(trainer: Any) -> bool:
    """Whether each rank writes optimizer pieces under DDP."""
    return getattr(trainer, "local", None) is not None or getattr(trainer, "powersgd", None) is not None


def facts_of(trainer: Any) -> dict[str, Any] | None:
    """Returns what `states.json` says of own states, `None` where there are none. Collective."""
    if not has_own(trainer):
        return None
    local = trainer.local
    return {
        "world": int(trainer.args.world_size),
        "local": local is not None,
        "window": local.window if local else 0,
        "tokens": local.counts() if local else [],
    }


def take_extra(trainer: Any, add: Add, average: Mapping[str, Tensor]) -> None:
    """Adds this rank's pieces that are none of the optimizer's; `average` holds the ranks' average where weights differ, on rank 0."""
    first, local, powersgd = int(trainer.args.process_index) == 0, trainer.local, trainer.powersgd
    for name, value in average.items() if first else ():
        _slice(add, AVERAGE, name, value)
    if local is not None and first:
        for name, anchor, velocity in zip(local.names, local.anchor, local.velocity, strict=True):
            _slice(add, ANCHOR, name, anchor)
            _slice(add, MOMENTUM, name, velocity)
    if powersgd is not None:
        for name, error in powersgd.error.items():
            _slice(add, ERROR, name, error)
        for name, basis in powersgd.basis.items() if first else ():
            add(BASIS, basis, name, "whole", 0, basis.numel(), tuple(basis.shape))


def _slice(add: Add, state: str, name: str, value: Tensor) -> None:
    add(state, value.reshape(-1), name, "slice", 0, value.numel(), tuple(value.shape))


class MeanShelf(Shelf):
    """Several ranks' own states read as one: numbers of each element are averaged, everything else is the first rank's."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self.shelves, first = tuple(shelves), shelves[0]
        self.checkpoint, self.weights, self._open = first.checkpoint, first.weights, first._open
        self._pieces, self._states, self._values = first._pieces, first._states, first._values

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
    """Whether all ranks go on with the weights that they had."""


def sources_of(trainer: Any, checkpoint: Path, facts: StatesFacts, shelf: Shelf) -> Sources:
    """Returns the sources; `shelf` is what rank 0 wrote. Collective where ranks have own states.

    A rank takes its own states where they are, in the checkpoint or in what a machine with a folder of its own keeps. One that has none
    (another number of ranks, a lost machine) takes the mean of those in the checkpoint, and all then begin with the average's weights.
    """
    if facts.own is None:
        return Sources(values=shelf, order=VALUES, states=shelf, errors=shelf, alike=True)
    mine = _own_shelf(trainer, checkpoint, facts)
    missing = torch.tensor([float(mine is None)], dtype=torch.float64, device=trainer._sums_on())
    alike = not trainer._gather(missing).any()
    found = [path for rank in range(facts.own["world"]) if (path := checkpoint / optimizer_file(rank)).is_file()]
    own = mine or MeanShelf([Shelf(checkpoint, 0, only=path) for path in found])
    different = facts.own["window"] > 0 and alike
    return Sources(
        values=own if different else shelf,
        order=VALUES if different else (AVERAGE, *VALUES),
        states=own if facts.own["local"] else shelf,
        errors=own,
        alike=alike,
    )


def _own_shelf(trainer: Any, checkpoint: Path, facts: StatesFacts) -> Shelf | None:
    assert facts.own is not None
    if facts.own["world"] != trainer.args.world_size or not has_own(trainer):
        return None
    name = optimizer_file(int(trainer.args.process_index))
    path = checkpoint / name if (checkpoint / name).is_file() else kept_apart(trainer, checkpoint, name)
    return None if path is None else Shelf(checkpoint, 0, only=path)


def restore_extra(trainer: Any, facts: StatesFacts, shelf: Shelf, sources: Sources) -> None:
    """Puts back what local steps and PowerSGD keep. Call when the weights are in."""
    if getattr(trainer, "local", None) is not None:
        _restore_local(trainer, facts, shelf, sources)
    if getattr(trainer, "powersgd", None) is not None:
        _restore_powersgd(trainer, shelf, sources)


def _restore_local(trainer: Any, facts: StatesFacts, shelf: Shelf, sources: Sources) -> None:
    local = trainer.local
    for index, (name, parameter) in enumerate(zip(local.names, local.parameters, strict=True)):
        if not shelf.pieces(name, ANCHOR):  # of a run that had one rank until now
            local.anchor[index].copy_(parameter.detach())
            continue
        for state, target in ((ANCHOR, local.anchor[index]), (MOMENTUM, local.velocity[index])):
            shelf.fill(target.view(-1), name, state, 0, target.numel())
    if facts.own is not None and facts.own["local"]:
        local.window = int(facts.own["window"])
        local.tokens = int(facts.own["tokens"][trainer.args.process_index]) if sources.alike else 0


def _restore_powersgd(trainer: Any, shelf: Shelf, sources: Sources) -> None:
    powersgd, device = trainer.powersgd, trainer.args.device
    for name, parameter in trainer.model.named_parameters():
        bases: list[Piece] = shelf.pieces(name, BASIS)
        if not parameter.requires_grad or not bases:
            continue
        powersgd.basis[name] = shelf.whole(bases[0]).to(device)
        error = torch.zeros(parameter.numel(), device=device)
        if sources.errors.pieces(name, ERROR):
            sources.errors.fill(error, name, ERROR, 0, error.numel())
        powersgd.error[name] = error.view(parameter.shape[0], -1)


# What ranks keep that do not see rank 0's folder: files in `random/step-NNNNNN/` of their own run folder, each rank's with its manifest.
#
# A manifest of each rank, since several ranks of a machine write there, and a cluster's launcher brings those of all machines together.


def seal_own(folder: Path, rank: int, files: Mapping[str, Facts]) -> None:
    """Writes the manifest of a rank's own files, once they are on the disk and have been compared. Raises `OSError`."""
    write_part(folder, rank, files)


def kept_apart(trainer: Any, checkpoint: Path, name: str) -> Path | None:
    """Returns this rank's own file `name` at the step of a checkpoint; `None` where there is none, or a damaged one, which is said."""
    folder: Path = trainer.run.random_states(int(checkpoint.name.rpartition("-")[2]))
    if (folder / name).exists() and _intact(folder, int(trainer.args.process_index), name):
        return folder / name
    return None


@functools.cache
def _intact(folder: Path, rank: int, name: str) -> bool:
    """Reads the file once in a process, and says once what is wrong with it."""
    problem = _problem(folder, rank, name)
    if problem is not None:
        print(f"note: {folder}: {problem}; it counts as absent", file=sys.stderr, flush=True)
    return problem is None


def _problem(folder: Path, rank: int, name: str) -> str | None:
    path = folder / f".manifest-rank{rank}.json"
    try:
        facts: Facts = read_json(path)["files"][name]
        return damage(folder, {name: facts})
    except FileNotFoundError:
        return f"`{name}` stands in no manifest: it was never completed"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"`{path.name}` cannot be read: {error}"
