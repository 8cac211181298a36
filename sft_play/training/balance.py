"""Measure unequal ranks while training and adjust their shares of a step (STATUS B11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback

from sft_play.config.schema import Config
from sft_play.data.batches import GlobalBatchSampler, Shares
from sft_play.plan.batch import Cost, Slots, share_out, spans, step_seconds
from sft_play.plan.plan import Plan, RankPlan
from sft_play.text import tell
from sft_play.training.metrics import Lap, Stopwatch
from sft_play.training.ranks import TrainContext

Table = NDArray[np.float64]
"""Each rank's seconds, rows, tokens and micro-steps [ranks, 4]."""
HEADROOM = 2
"""Under DDP a rank may get at most this many times the plan's largest number of micro-steps."""
UNCOUNTED = 2
"""First steps of a process, which do not represent later ones."""
FIRST, EVERY = 5, 10
"""Steps of a process before ranks first compare their speeds, and between later comparisons."""
GAIN = 1.05
"""Least forecast speed-up of a step."""
GAP, LOOKS = 1.15, 3
"""With equal devices: how many times slower the slowest rank must be, and in how many consecutive comparisons."""
SECONDS = {True: 2.0, False: 0.5}
"""Whether devices are equal -> seconds that a rank must have computed before its measurement counts."""
KEPT = 0.5
"""Weight of earlier measurements, against 1 for the newest."""


def rebalances(config: Config, plan: Plan) -> bool:
    """Return whether shares may change while training.

    Under ZeRO-3 and FSDP2 ranks wait for each other inside every layer, so none can measure its own speed: the plan's
    shares stay. They also stay if the user typed a micro-batch or accumulation, or if ranks hold slices of a line.
    """
    typed = plan.group_size > 1 or config.train.batch_size != "auto" or config.train.grad_accum != "auto"
    return (
        config.launch.balance == "auto"
        and not typed
        and plan.world_size > 1
        and plan.strategy in ("ddp", "zero1", "zero2")
    )


def turns_of(config: Config, plan: Plan) -> int:
    """Return the training loop's micro-steps per optimizer step, the same on every rank; some may be empty."""
    planned = max(rank.accumulation for rank in plan.ranks)
    if plan.sharded or not rebalances(config, plan):
        return planned
    needed = max(-(-plan.global_batch_size // rank.micro_batch) for rank in plan.ranks if rank.micro_batch)
    return max(planned, min(needed, HEADROOM * planned))


class ShareChooser:
    """Decide from all ranks' measurements whether other shares pay, equally on every rank, without communication."""

    def __init__(self, plan: Plan, turns: int) -> None:
        self.plan, self.turns = plan, turns
        self.alike = len({rank.device_name for rank in plan.ranks}) == 1
        self.rows = sum(map(math.prod, plan.slots)) if plan.pack_tokens else plan.global_batch_size
        """Rows of a step to divide; with packing, its largest number of packs."""
        planned = spans(self.rows, plan.slots)
        self.working = tuple(rank for rank, rows in enumerate(planned) if rows)
        """Ranks that have work in the plan; each keeps at least one row, or it would never be measured again."""
        self.sums: Table = np.zeros((len(plan.ranks), 4))
        """Seconds, rows, tokens and micro-steps of each rank; older measurements weigh less."""
        self._window = np.zeros_like(self.sums)
        self._looks = 0

    def look(self, measured: Sequence[Sequence[float]], shares: Shares) -> Shares | None:
        """Return better shares than `shares`, or `None` to keep them.

        `measured` holds each rank's seconds, rows, tokens and micro-steps.
        """
        self._window = self._window + measured
        if self._window[:, 0].max() < SECONDS[self.alike]:
            return None
        window, self._window = self._window, np.zeros_like(self._window)
        has_tokens = window[:, 2:3] > 0
        self.sums = np.where(has_tokens, KEPT * self.sums + window, self.sums)
        if self.alike:
            self._looks = self._looks + 1 if self._uneven(window, shares) else 0
            if self._looks < LOOKS:
                return None
        self._looks = 0
        return self._better(self.sums, shares)

    def _uneven(self, window: Table, shares: Shares) -> bool:
        """Return whether this window alone justifies other shares."""
        paces = [pace for pace in paces_of(window) if pace]
        rows = spans(self.rows, shares)
        differs = max(rows) > min(rows) + 1 or max(paces) >= GAP * min(paces)
        return differs and self._better(window, shares) is not None

    def _better(self, sums: Table, shares: Shares) -> Shares | None:
        costs = self.costs(sums)
        if not all(cost.most_rows for cost, (micro, _) in zip(costs, shares, strict=True) if micro):
            return None  # a rank that has work was not measured
        same = self.plan.sharded
        better = within(self.rows, costs, self.turns, same_steps=same)
        better = better and at_work(self.rows, better, costs, self.turns, self.working, same_steps=same)
        if better is None or better == shares:
            return None
        before, after = (step_seconds(self.rows, shares_tried, costs) for shares_tried in (shares, better))
        return better if before > GAIN * after else None

    def costs(self, sums: Table) -> list[Cost]:
        """Return the cost of a row (or pack) on each rank; a rank that was never measured takes no rows."""
        _, rows, trained_tokens, micro_steps = zip(*sums, strict=True)
        tokens, units = sum(trained_tokens), sum(rows)
        if self.plan.pack_tokens:
            units = sum(n * rank.micro_batch for n, rank in zip(micro_steps, self.plan.ranks, strict=True))
        costs = []
        for (seconds, _, mine, _), rank in zip(sums, self.plan.ranks, strict=True):
            if not (seconds and mine):
                costs.append(Cost(row_seconds=1.0, most_rows=0))
                continue
            costs.append(Cost(row_seconds=seconds / mine * tokens / max(units, 1.0), most_rows=self.most(rank)))
        return costs

    def most(self, rank: RankPlan) -> int:
        """Return the largest micro-batch that a rank may get.

        Under DDP more rows mean more micro-steps of the planned size. Otherwise the micro-batch grows within the rank's
        memory, unless memory ran out before, or only the planned size was tried on the device (`source: probe`).
        """
        if not self.plan.sharded or self.plan.recoveries or self.plan.source == "probe":
            return rank.micro_batch
        return max(rank.micro_batch, rank.most_rows)


def paces_of(sums: Table) -> list[float]:
    """Return each rank's seconds per token, or 0 if it was not measured."""
    return [seconds / tokens if tokens else 0.0 for seconds, _, tokens, _ in sums]


def within(rows: int, costs: Sequence[Cost], turns: int, *, same_steps: bool) -> Shares | None:
    """Return `share_out` with at most `turns` micro-steps each, or `None` if there are no such shares.

    A rank that would need more micro-steps gets `turns`, and the others share the rest.
    """
    if not any(cost.most_rows for cost in costs):
        return None
    shares: Shares = share_out(rows, costs, same_steps=same_steps)
    over = [rank for rank, (_, steps) in enumerate(shares) if steps > turns]
    if not over:
        return shares
    full: dict[int, Slots] = {rank: (costs[rank].most_rows, turns) for rank in over}
    rest = [rank for rank in range(len(costs)) if rank not in full]
    rows_left = rows - sum(micro * steps for micro, steps in full.values())
    if same_steps or (rows_left > 0 and not rest):
        return None
    if rows_left > 0:
        shared = within(rows_left, [costs[rank] for rank in rest], turns, same_steps=False)
        if shared is None:
            return None
        full |= dict(zip(rest, shared, strict=True))
    return tuple(full.get(rank, (0, 1)) for rank in range(len(costs)))


def at_work(
    rows: int, shares: Shares, costs: Sequence[Cost], turns: int, working: Sequence[int], *, same_steps: bool
) -> Shares | None:
    """Return the shares with at least one row for each of the ranks `working`, or `None` if that does not fit.

    A rank without rows gets one slot after the other: under DDP micro-steps, then rows in each; with `same_steps` rows.
    """
    slots = list(shares)
    for _ in range(rows * len(shares)):
        counts = spans(rows, slots)
        idle = next((rank for rank in working if not counts[rank]), None)
        if idle is None:
            return tuple(slots)
        micro, steps = slots[idle]
        if micro and not same_steps and steps < turns:
            slots[idle] = (micro, steps + 1)
        elif micro < costs[idle].most_rows:
            slots[idle] = (micro + 1, steps)
        else:
            return None
    return None


class Balancer(TrainerCallback):
    """Compare the ranks' speeds between optimizer steps and adjust the shares of a sampler."""

    def __init__(self, context: TrainContext, sampler: GlobalBatchSampler, watch: Stopwatch) -> None:
        config, plan = context.config, context.plan
        self.context, self.sampler = context, sampler
        self.active = rebalances(config, plan)
        self.lap = Lap(watch)
        self.chooser = ShareChooser(plan, turns_of(config, plan))
        self._steps = 0

    def measure(self) -> list[float]:
        """Return this rank's compute seconds, rows, tokens and micro-steps since the last call.

        If ranks communicate in the backward pass, only the forward pass counts.
        """
        lap = self.lap.take()
        seconds = lap["forward"] + (0.0 if self.context.plan.sharded else lap["backward"])
        return [seconds, lap["rows"], lap["tokens"], lap["micro_steps"]]

    def micro_batch(self, step: int) -> int | None:
        """Return this rank's largest micro-batch in an optimizer step (from 1), or `None` with the plan's shares."""
        if len(self.sampler.changes) == 1:
            return None
        return self.sampler.shares_at(step - 1)[self.sampler.rank][0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and compare speeds when due; that is collective, and all ranks make the same steps."""
        self._steps += 1
        if not self.active:
            return
        if self._steps == UNCOUNTED:
            self.lap.take()
        elif (self._steps == FIRST or self._steps % EVERY == 0) and state.global_step < state.max_steps:
            self._look(state.global_step)

    def _look(self, step: int) -> None:
        sampler = self.sampler
        table = self.context.ranks.table([*self.measure(), sampler.next_step])
        before = sampler.ranks
        after = self.chooser.look([row[:4] for row in table], before)
        first = max(int(row[4]) for row in table)  # batches that a rank's loader has prefetched keep the old shares
        if after is not None and sampler.holds(after):
            sampler.adopt(first, after)
            if self.context.ranks.first:
                self._report(step, first + 1, before, after)

    def _report(self, step: int, first: int, before: Shares, after: Shares) -> None:
        paces, unit = paces_of(self.chooser.sums), "packs" if self.context.plan.pack_tokens else "rows"
        now, then = spans(self.chooser.rows, after), spans(self.chooser.rows, before)
        change = describe(paces, now, then, "shares of packs" if unit == "packs" else unit)
        tell(f"from step {first} on: {change}")
        facts = {"from_step": first, "shares": after, unit: now, "seconds_per_token": paces}
        self.context.add_row(kind="balance", step=step, **facts)


def describe(paces: Sequence[float], now: Sequence[int], then: Sequence[int], unit: str) -> str:
    """Describe a change of shares; `paces` are seconds per token."""
    measured = [pace for pace in paces if pace]
    slowest, times = max(range(len(paces)), key=lambda rank: paces[rank]), max(measured) / min(measured)
    why = f"rank {slowest} is {times:.1f} times slower than rank {paces.index(min(measured))}"
    shares = (" + ".join(map(str, counts)) for counts in (now, then))
    return (
        f"{why if times >= GAP else 'the ranks are about equally fast'}: {unit} per step {' instead of '.join(shares)}"
    )
