"""Which rows make up each micro-batch of each rank, the same order on every world size, and how they become tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sft_play.data import IGNORED, WEIGHTS
from sft_play.plan.batch import Slots
from sft_play.plan.epoch import RowOrder, best_fit
from sft_play.plan.shape import BY_LENGTHS

Item = TypeVar("Item")
Shares = tuple[Slots, ...]
"""The slots of every rank."""


class GlobalBatchSampler:
    """Yields lists of row indices: one rank's micro-batches, `turns` of them per optimizer step on every rank.

    Every optimizer step takes the next `global_batch` rows of an order that depends on seed and epoch only, so the rows
    of step n are the same for every world size. The last step of an epoch takes what is left: no row is dropped. Ranks
    take contiguous spans in proportion to their slots; a list may be empty, and a rank with fewer micro-steps than
    `turns` has its empty ones first, so that the last micro-step, which updates, is a real one on as many ranks as can
    be.

    With `pack_tokens` the rows of each global batch are put into packs of at most so many tokens, and slots hold packs:
    as few micro-steps as hold them all, after micro-steps that are empty on every rank. Ranks whose numbers of
    micro-steps differ are dealt packs so that their tokens are in proportion to their slots.

    Shares may change while training: `adopt` says from which optimizer step on. What a step trains never depends on
    them.
    """

    def __init__(
        self,
        order: RowOrder,
        global_batch: int,
        ranks: Sequence[Slots],
        rank: int,
        *,
        lengths: Sequence[int] = (),
        pack_tokens: int = 0,
        turns: int = 0,
    ) -> None:
        """`lengths` are needed for packing; `turns` is at least the most micro-steps of any rank."""
        self.turns = max(turns, *(steps for _, steps in ranks))
        self.global_batch = global_batch
        self.pack_tokens = pack_tokens
        if order.rows < 1 or global_batch < 1 or not self.holds(ranks):
            capacity = sum(micro * steps for micro, steps in ranks)
            raise ValueError(f"{order.rows} rows in global batches of {global_batch} do not fit {capacity} slots")
        self.order = order
        self.rank = rank
        self.epoch = 0
        self.lengths = lengths
        self.changes: list[tuple[int, Shares]] = [(0, tuple(ranks))]
        """Which shares hold from which optimizer step on; 0 is the first of the run."""
        self.next_step = 0
        """The first optimizer step of the run whose rows have not been cut yet; a loader that fetches ahead is beyond
        the trainer.
        """

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.order.rows // self.global_batch)

    @property
    def ranks(self) -> Shares:
        """The shares that were adopted last."""
        return self.changes[-1][1]

    def shares_at(self, step: int) -> Shares:
        """Return the shares of an optimizer step of the run."""
        return next(shares for start, shares in reversed(self.changes) if start <= step)

    def holds(self, shares: Sequence[Slots]) -> bool:
        """Return whether slots have room for every step, in no more micro-steps than there are."""
        room = sum(micro * (self.turns if self.pack_tokens else steps) for micro, steps in shares)
        return max(steps for _, steps in shares) <= self.turns and (
            room >= self.global_batch or bool(self.pack_tokens and room)
        )

    def adopt(self, step: int, shares: Sequence[Slots]) -> None:
        """Use `shares` from an optimizer step on. Raise `ValueError` for a step that is cut already, or for too few
        slots.
        """
        if step < self.next_step or not self.holds(shares) or len(shares) != len(self.ranks):
            raise ValueError(
                f"shares {shares} cannot hold from step {step} on: {self.next_step} steps are cut, {self.turns} turns"
            )
        self.changes = [(start, earlier) for start, earlier in self.changes if start < step] + [(step, tuple(shares))]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; called by accelerate's loader at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.turns

    def __iter__(self) -> Iterator[list[int]]:
        order, first = self.order(self.epoch), self.epoch * self.steps
        for index, start in enumerate(range(0, self.order.rows, self.global_batch)):
            self.next_step = first + index + 1
            yield from self.share(order[start : start + self.global_batch], self.shares_at(first + index))

    def share(self, batch: Sequence[int], shares: Shares | None = None) -> list[list[int]]:
        """Return this rank's micro-batches of one global batch, `turns` of them."""
        shares = shares or self.ranks
        if self.pack_tokens:
            micro_batches = self._share_packs(batch, shares)
        else:
            mine = _cut(batch, [micro * steps for micro, steps in shares])[self.rank]
            micro_batches = _cut(mine, [1] * shares[self.rank][1])
        return [[]] * (self.turns - len(micro_batches)) + micro_batches

    def _share_packs(self, batch: Sequence[int], shares: Shares) -> list[list[int]]:
        sizes = [self.lengths[row] for row in batch]
        packs = best_fit(sizes, self.pack_tokens)
        # Fullest first: packs that ranks work on at the same time are about as long.
        packs.sort(key=lambda pack: -sum(sizes[index] for index in pack))
        if len({steps for _, steps in shares}) == 1:
            turns = _by_turns(packs, shares, self.rank)
        else:
            weights = [sum(sizes[index] for index in pack) for pack in packs]
            mine = [packs[index] for index in _deal(weights, shares, self.turns)[self.rank]]
            turns = _cut(mine, [1] * -(-len(mine) // max(1, shares[self.rank][0])))
        return [[batch[index] for pack in packs_of_turn for index in pack] for packs_of_turn in turns]


def _by_turns(packs: Sequence[Item], shares: Shares, rank: int) -> list[list[Item]]:
    """Return a rank's packs of each micro-step, for ranks that make as many: all share out the packs of each."""
    micros, steps = [micro for micro, _ in shares], shares[0][1]
    turns = -(-len(packs) // sum(micros))
    if turns > steps:
        raise ValueError(f"{len(packs)} packs do not fit {sum(micros) * steps} slots")
    return [_cut(span, micros)[rank] for span in _cut(packs, [sum(micros)] * turns)]


def _deal(weights: Sequence[int], shares: Shares, turns: int) -> list[list[int]]:
    """Return which packs each rank gets, given their tokens, the most first: each goes where tokens per slot are then
    the fewest.
    """
    slots = [micro * steps for micro, steps in shares]
    packs: list[list[int]] = [[] for _ in shares]
    loads = [0] * len(shares)
    for index, weight in enumerate(weights):
        free = [rank for rank, (micro, _) in enumerate(shares) if len(packs[rank]) < micro * turns]
        if not free:
            raise ValueError(f"{len(weights)} packs do not fit {sum(micro for micro, _ in shares) * turns} slots")
        rank = min(free, key=lambda candidate: ((loads[candidate] + weight) / slots[candidate], candidate))
        packs[rank].append(index)
        loads[rank] += weight
    return packs


def _cut(rows: Sequence[Item], weights: Sequence[int]) -> list[list[Item]]:
    """Cut `rows` into contiguous spans in proportion to `weights`.

    With no more rows than the weights' sum, no span is longer than its weight (rounded up in equal shares): the
    boundaries are floor(n * W_i / W), so a span holds at most ceil(n * w_i / W) rows.
    """
    total, reached, spans, start = sum(weights), 0, [], 0
    for weight in weights:
        reached += weight
        end = len(rows) * reached // total
        spans.append(list(rows[start:end]))
        start = end
    return spans


# Rows to tensors. The head of the model runs only where a loss is computed (`logits_to_keep`).


Batch = dict[str, Any]
Line = tuple[list[int], list[int], list[float]]
"""Tokens, labels and weights of a row."""


class Collator:
    """Turns a micro-batch of prepared rows into a batch dictionary.

    `flattened`: rows one after another in one line, told apart by restarting position ids, without an attention mask:
    `input_ids` and `position_ids` [1, T], `logits_to_keep` [K] (positions whose next token is trained), `targets` [K].

    `padded`: one line per row, padded on the right: `input_ids`, `attention_mask`, `position_ids` [B, S],
    `logits_to_keep` [P] (the union over rows), `targets` [B, P] with -100 where a row has none. `unmasked`: the same
    without mask and position ids, for families whose attention is causal: no token of a row sees the padding behind it.

    Where any row has weights, `weights` (fp32) is of the shape of `targets`.

    Where `attention` tells rows apart by their lengths, a flattened batch has them (`lengths_of`).

    An empty micro-batch gives one dummy line with one ignored target: its loss is 0 and its gradients are 0, but every
    collective operation of a step still happens. `rows` and `lengths` keep the rows' ids and lengths, `tokens` counts
    theirs; none reaches the model.

    `part` (i, N): of a flattened line, made longer by a row of padding where N does not divide it, only slice i of N
    equal ones, its targets and tokens; the lengths stay those of the whole line (`model.parallel`).
    """

    def __init__(
        self,
        layout: str,
        pad_token_id: int,
        attention: str = "sdpa",
        device: str = "cpu",
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.layout = layout
        self.pad_token_id = pad_token_id
        self._nothing: Line = ([pad_token_id] * 2, [IGNORED] * 2, [0.0] * 2)
        self.by_lengths = attention in BY_LENGTHS
        self.device = device
        self.part = part

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        parts = [
            (list(row["input_ids"]), list(row["labels"]), list(row.get(WEIGHTS) or [1.0] * len(row["labels"])))
            for row in rows
        ]
        batch = self._flattened(parts) if self.layout == "flattened" else self._padded(parts)
        if not any(row.get(WEIGHTS) for row in rows):
            del batch[WEIGHTS]
        batch["rows"] = [int(row.get("row", -1)) for row in rows]
        batch["lengths"] = [len(row["input_ids"]) for row in rows]
        whole, (which, number) = sum(batch["lengths"]), self.part
        width = batch["input_ids"].shape[1]
        batch["tokens"] = whole if number == 1 else len(range(whole)[which * width : (which + 1) * width])
        return batch

    def _flattened(self, parts: Sequence[Line]) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        targets: list[tuple[int, float]] = []
        ends = [0]
        for tokens, labels, weights in parts or [self._nothing]:
            start = len(ids)
            ids += tokens
            positions += range(len(tokens))
            ends.append(len(ids))
            for index in range(1, len(tokens)):  # the first token of a row follows nothing
                if labels[index] != IGNORED:
                    keep.append(start + index - 1)
                    targets.append((labels[index], weights[index]))
        which, number = self.part
        width = -(-len(ids) // number)
        if padding := width * number - len(ids):
            ids += [self.pad_token_id] * padding
            positions += range(padding)
            ends.append(len(ids))
        mine = slice(which * width, (which + 1) * width)
        predicted = [
            (at - mine.start, *target) for at, target in zip(keep, targets, strict=True) if mine.start <= at < mine.stop
        ]
        predicted = predicted or [(0, IGNORED, 0.0)]
        return {
            "input_ids": torch.tensor([ids[mine]]),
            "position_ids": torch.tensor([positions[mine]]),
            "logits_to_keep": torch.tensor([at for at, *_ in predicted]),
            "targets": torch.tensor([target for _, target, _ in predicted]),
            WEIGHTS: torch.tensor([weight for *_, weight in predicted]),
            **(lengths_of(ends, max(positions) + 1, self.device) if self.by_lengths else {}),
        }

    def _padded(self, parts: Sequence[Line]) -> Batch:
        lines = parts or [self._nothing]
        width = max(
            2, *(len(tokens) for tokens, *_ in lines)
        )  # a lone first token still needs a place for its ignored target
        keep = sorted({i - 1 for _, labels, _ in lines for i in range(1, len(labels)) if labels[i] != IGNORED}) or [0]
        ids, targets, weights = (
            [line[which] + [filler] * (width - len(line[which])) for line in lines]
            for which, filler in enumerate((self.pad_token_id, IGNORED, 0.0))
        )
        batch = {
            "input_ids": torch.tensor(ids),
            "logits_to_keep": torch.tensor(keep),
            "targets": torch.tensor([[labels[i + 1] for i in keep] for labels in targets]),
            WEIGHTS: torch.tensor([[line[i + 1] for i in keep] for line in weights]),
        }
        if self.layout == "padded":
            mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens, *_ in lines])
            batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        return batch


def lengths_of(ends: Sequence[int], longest: int, device: str) -> Batch:
    """Return where rows end, [R + 1] from 0: as numbers for `model.kernels`; for a GPU's flash attention too, int32,
    with the longest.
    """
    if device == "cpu":
        return {"row_ends": tuple(ends)}
    places = torch.tensor(ends, dtype=torch.int32)
    of_kernels = {"cu_seq_lens_q": places, "cu_seq_lens_k": places, "max_length_q": longest, "max_length_k": longest}
    return {"row_ends": tuple(ends), **of_kernels}
