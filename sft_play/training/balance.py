"""Shares of a step for unequal ranks, measured and adjusted while training (STATUS B11)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from sft_play.config.schema import Config
from sft_play.data.batches import GlobalBatchSampler, Shares
from sft_play.plan.batch import Cost, Slots, share_out, spans, step_seconds
from sft_play.plan.plan import Plan, RankPlan
from sft_play.training.metrics import Lap, Stopwatch
from sft_play.training.ranks import TrainContext

HEADROOM = 2
"""Under DDP a rank may come to make so many times the micro-steps that the plan gives to any."""
UNCOUNTED = 2
"""Steps of a process that tell nothing of later ones."""
FIRST, EVERY = 5, 10
"""Steps of a process after which ranks look at each other for the first time, and then between two looks."""
GAIN = 1.05
"""How many times faster a step must be by forecast."""
GAP, LOOKS = 1.15, 3
"""Between alike devices: how many times slower the slowest rank must be, and how many times running."""
SECONDS = {True: 2.0, False: 0.5}
"""Alike devices or not -> seconds that a rank must have computed before what was measured counts."""
KEPT = 0.5
"""Weight of earlier measurements, against 1 for the newest."""


def rebalances(config: Config, plan: Plan) -> bool:
    """Whether shares may change while training.

    Under ZeRO-3 and FSDP2 ranks wait for each other inside every layer, so none can tell its own speed: there the
    plan's shares stay, as they do where a micro-batch or accumulation was typed, or slices of a line keep ranks
    together.
    """
    typed = plan.group_size > 1 or config.train.batch_size != "auto" or config.train.grad_accum != "auto"
    return (
        config.launch.balance == "auto"
        and not typed
        and plan.world_size > 1
        and plan.strategy in ("ddp", "zero1", "zero2")
    )


def together(plan: Plan) -> bool:
    """Whether all ranks must make the same micro-steps: their engine communicates in each. Under DDP they meet in the
    last one only.
    """
    return plan.strategy not in ("single", "ddp")


def turns_of(config: Config, plan: Plan) -> int:
    """Return the micro-steps of an optimizer step as the training loop counts them, the same on every rank; some may be
    empty.
    """
    most = max(rank.accumulation for rank in plan.ranks)
    if together(plan) or not rebalances(config, plan):
        return most
    needed = max(-(-plan.global_batch_size // rank.micro_batch) for rank in plan.ranks if rank.micro_batch)
    return max(most, min(needed, HEADROOM * most))


class Judge:
    """Decides from what all ranks measured whether other shares are worth it; the same on every rank. No torch, no
    communication.
    """

    def __init__(self, plan: Plan, turns: int) -> None:
        self.plan, self.turns = plan, turns
        self.alike = len({rank.device_name for rank in plan.ranks}) == 1
        slots = sum(rank.micro_batch * rank.accumulation for rank in plan.ranks)
        self.rows = slots if plan.pack_tokens else plan.global_batch_size
        """What is shared out: a step's rows, with packing as many packs as it may have."""
        planned = spans(self.rows, [(rank.micro_batch, rank.accumulation) for rank in plan.ranks])
        self.working = tuple(rank for rank, rows in enumerate(planned) if rows)
        """Ranks that the plan gave work: each keeps a row at least, or none would ever measure it again."""
        self.sums = [[0.0] * 4 for _ in plan.ranks]
        """Seconds, rows, tokens, micro-steps of each rank, older ones with less weight."""
        self._window = [[0.0] * 4 for _ in plan.ranks]
        self._looks = 0

    def look(self, measured: Sequence[Sequence[float]], shares: Shares) -> Shares | None:
        """Return the shares to change to from `shares`, `None` to keep them. `measured`: of each rank, seconds, rows,
        tokens and micro-steps.
        """
        self._window = [
            [a + b for a, b in zip(*pair, strict=True)] for pair in zip(self._window, measured, strict=True)
        ]
        if max(seconds for seconds, *_ in self._window) < SECONDS[self.alike]:
            return None
        window, self._window = self._window, [[0.0] * 4 for _ in measured]
        self.sums = [
            [KEPT * a + b for a, b in zip(*pair, strict=True)] if pair[1][2] else pair[0]
            for pair in zip(self.sums, window, strict=True)
        ]
        if self.alike:
            self._looks = self._looks + 1 if self._uneven(window, shares) else 0
            if self._looks < LOOKS:
                return None
        self._looks = 0
        return self._better(self.sums, shares)

    def _uneven(self, window: Sequence[Sequence[float]], shares: Shares) -> bool:
        """Whether this window alone speaks for other shares."""
        paces = [pace for pace in paces_of(window) if pace]
        rows = spans(self.rows, shares)
        return (max(rows) > min(rows) + 1 or max(paces) >= GAP * min(paces)) and self._better(
            window, shares
        ) is not None

    def _better(self, sums: Sequence[Sequence[float]], shares: Shares) -> Shares | None:
        costs = self.costs(sums)
        if not all(cost.most_rows for cost, (micro, _) in zip(costs, shares, strict=True) if micro):
            return None  # a rank that has work was not measured
        same = together(self.plan)
        best = within(self.rows, costs, self.turns, same_steps=same)
        best = best and at_work(self.rows, best, costs, self.turns, self.working, same_steps=same)
        if best is None or best == shares:
            return None
        before, after = (step_seconds(self.rows, one, costs) for one in (shares, best))
        return best if before > GAIN * after else None

    def costs(self, sums: Sequence[Sequence[float]]) -> list[Cost]:
        """Return what a row (or pack) costs each rank; one that was never measured can take none."""
        tokens, units = sum(one[2] for one in sums), sum(one[1] for one in sums)
        if self.plan.pack_tokens:
            units = sum(one[3] * rank.micro_batch for one, rank in zip(sums, self.plan.ranks, strict=True))
        found = []
        for (seconds, _, mine, _), rank in zip(sums, self.plan.ranks, strict=True):
            if not (seconds and mine):
                found.append(Cost(row_seconds=1.0, most_rows=0))
                continue
            found.append(Cost(row_seconds=seconds / mine * tokens / max(units, 1.0), most_rows=self.most(rank)))
        return found

    def most(self, rank: RankPlan) -> int:
        """Return the largest micro-batch that a rank may come to have.

        Under DDP more rows mean more micro-steps of the size that was planned. Elsewhere the micro-batch grows, within
        its memory: not where memory ran out before, nor where the planned one was tried on the device (`source: probe`)
        and no other was.
        """
        if not together(self.plan) or self.plan.recoveries or self.plan.source == "probe":
            return rank.micro_batch
        return max(rank.micro_batch, rank.most_rows)


def paces_of(sums: Sequence[Sequence[float]]) -> list[float]:
    """Return each rank's seconds per token; 0 where nothing was measured."""
    return [seconds / tokens if tokens else 0.0 for seconds, _, tokens, _ in sums]


def within(rows: int, costs: Sequence[Cost], turns: int, *, same_steps: bool) -> Shares | None:
    """Return `share_out` with at most `turns` micro-steps each; `None` where there are no such shares.

    A rank that would need more gets as many as it can make, and the others share the rest.
    """
    if not any(cost.most_rows for cost in costs):
        return None
    found: Shares = share_out(rows, costs, same_steps=same_steps)
    over = [rank for rank, (_, steps) in enumerate(found) if steps > turns]
    if not over:
        return found
    full: dict[int, Slots] = {rank: (costs[rank].most_rows, turns) for rank in over}
    rest = [rank for rank in range(len(costs)) if rank not in full]
    left = rows - sum(micro * steps for micro, steps in full.values())
    if same_steps or (left > 0 and not rest):
        return None
    if left > 0:
        shared = within(left, [costs[rank] for rank in rest], turns, same_steps=False)
        if shared is None:
            return None
        full |= dict(zip(rest, shared, strict=True))
    return tuple(full.get(rank, (0, 1)) for rank in range(len(costs)))


def at_work(
    rows: int, shares: Shares, costs: Sequence[Cost], turns: int, working: Sequence[int], *, same_steps: bool
) -> Shares | None:
    """Return the shares with a row at least for each of the ranks `working`; `None` where there is no room for that.

    A rank that has none gets one slot after the other: under DDP micro-steps, then rows in each; where ranks make as
    many micro-steps, rows.
    """
    found = list(shares)
    for _ in range(rows * len(shares)):
        counts = spans(rows, found)
        idle = next((rank for rank in working if not counts[rank]), None)
        if idle is None:
            return tuple(found)
        micro, steps = found[idle]
        if micro and not same_steps and steps < turns:
            found[idle] = (micro, steps + 1)
        elif micro < costs[idle].most_rows:
            found[idle] = (micro + 1, steps)
        else:
            return None
    return None


class Balancer(TrainerCallback):
    """Looks at the ranks' speeds between optimizer steps, and changes the shares of a sampler."""

    def __init__(self, context: TrainContext, sampler: GlobalBatchSampler, watch: Stopwatch) -> None:
        config, plan = context.config, context.plan
        self.context, self.sampler = context, sampler
        self.active = rebalances(config, plan)
        self.lap = Lap(watch)
        self.judge = Judge(plan, turns_of(config, plan))
        self._steps = 0

    def measure(self) -> list[float]:
        """Return seconds that this rank computed, rows, tokens and micro-steps since the last call.

        Where ranks communicate in the backward pass only the forward pass counts.
        """
        found = self.lap.take()
        seconds = found["forward"] + (0.0 if together(self.context.plan) else found["backward"])
        return [seconds, found["rows"], found["tokens"], found["micro_steps"]]

    def micro_batch(self, step: int) -> int | None:
        """Return this rank's largest micro-batch in an optimizer step (from 1) whose shares were found while training,
        else `None`.
        """
        if len(self.sampler.changes) == 1:
            return None
        return self.sampler.shares_at(step - 1)[self.sampler.rank][0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count, and looks when it is time. Collective then: all ranks make the same steps."""
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
        after = self.judge.look([row[:4] for row in table], before)
        first = max(int(row[4]) for row in table)  # whatever a rank's loader has fetched ahead stays as it was cut
        if after is not None and sampler.holds(after):
            sampler.adopt(first, after)
            if self.context.ranks.first:
                self._tell(step, first + 1, before, after)

    def _tell(self, step: int, first: int, before: Shares, after: Shares) -> None:
        paces, unit = paces_of(self.judge.sums), "packs" if self.context.plan.pack_tokens else "rows"
        now, then = spans(self.judge.rows, after), spans(self.judge.rows, before)
        said = describe(paces, now, then, "shares of packs" if unit == "packs" else unit)
        print(f"from step {first} on: {said}", file=sys.stderr, flush=True)
        facts = {"from_step": first, "shares": after, unit: now, "seconds_per_token": paces}
        self.context.add_row(kind="balance", step=step, **facts)


def describe(paces: Sequence[float], now: Sequence[int], then: Sequence[int], unit: str) -> str:
    """Return a change of shares in words; `paces` are seconds per token."""
    known = [pace for pace in paces if pace]
    slowest, times = max(range(len(paces)), key=lambda rank: paces[rank]), max(known) / min(known)
    why = f"rank {slowest} is {times:.1f} times slower than rank {paces.index(min(known))}"
    shares = (" + ".join(map(str, counts)) for counts in (now, then))
    return (
        f"{why if times >= GAP else 'the ranks are about equally fast'}: {unit} per step {' instead of '.join(shares)}"
    )
