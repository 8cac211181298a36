"""Unequal ranks: gradients stay exact for any slots, each rank times its own work alone, and shares change for good reasons only."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import Config, DataConfig, LaunchConfig, ModelConfig, TrainConfig
from sft_play.data.batches import Collator, GlobalBatchSampler, Shares
from sft_play.plan.batch import Cost, share_out, spans
from sft_play.plan.plan import Plan, RankPlan
from sft_play.training.balance import LOOKS, Judge, describe, within
from sft_play.training.loss import IDLE, label_tokens, step_totals, token_loss_sum
from sft_play.training.ranks import Ranks
from sft_play.training.readings import PHASES, Lap, Stopwatch
from tests.documents import on_page
from tests.numerics.test_layouts import VOCABULARY, random_model
from tests.plans import simple_plan

COUNT, LIMIT = 16, 48
UNEQUAL: list[Shares] = [((4, 3), (1, 5)), ((1, 1), (3, 2), (2, 5)), ((8, 2), (0, 1)), ((0, 1), (3, 6)), ((11, 2), (11, 1))]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    chance = random.Random(3)
    made = [[chance.randrange(3, VOCABULARY) for _ in range(chance.randint(3, 36))] for _ in range(COUNT)]
    return [{"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :], "row": i} for i, ids in enumerate(made)]


def micro_batches(shares: Shares, rows: list[dict[str, Any]], pack: int, turns: int = 8) -> list[list[list[dict[str, Any]]]]:
    """Returns the micro-batches of each rank of a step that has all rows."""
    lengths = [len(row["input_ids"]) for row in rows]
    samplers = [
        GlobalBatchSampler(COUNT, COUNT, shares, rank, 0, lengths=lengths, pack_tokens=pack, turns=turns)
        for rank in range(len(shares))
    ]
    return [[[rows[index] for index in batch] for batch in sampler] for sampler in samplers]


def gradient(model: Any, ranks: Sequence[Sequence[list[dict[str, Any]]]]) -> torch.Tensor:
    """Returns what data parallelism makes of the ranks' micro-steps, those left out that training leaves out: the mean over ranks."""
    collate, found = Collator("flattened", 0), []
    steps = [[collate(batch) for batch in batches] for batches in ranks]
    total = sum(int(label_tokens(batch)) for batches in steps for batch in batches)
    for batches in steps:
        step_totals(Ranks(), batches, together=False)
        model.zero_grad()
        done = 0
        for batch in batches[:-1]:
            if not batch.pop(IDLE):
                (token_loss_sum(model, batch) * len(ranks) / total).backward()
                done += 1
        assert done == sum(bool(batch["rows"]) for batch in batches[:-1]), "an empty micro-step is no pass"
        batches[-1].pop(IDLE)
        (token_loss_sum(model, batches[-1]) * len(ranks) / total).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("pack", [0, LIMIT])
@pytest.mark.parametrize("shares", UNEQUAL)
def test_gradients_are_those_of_one_process(shares: Shares, pack: int, rows: list[dict[str, Any]]) -> None:
    model = random_model("llama", "sdpa")
    wanted = gradient(model, [[rows]])
    found = gradient(model, micro_batches(shares, rows, pack))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("pack", [0, LIMIT])
@pytest.mark.parametrize("shares", UNEQUAL)
def test_every_rank_counts_as_many_micro_steps_with_the_real_ones_last(
    shares: Shares, pack: int, rows: list[dict[str, Any]]
) -> None:
    ranks = micro_batches(shares, rows, pack)
    assert Counter(row["row"] for batches in ranks for batch in batches for row in batch) == Counter(range(COUNT))
    for batches, (micro, _) in zip(ranks, shares, strict=True):
        assert len(batches) == 8
        assert bool(batches[-1]) == any(batches) <= bool(micro), "gradients meet in the last micro-step"
    if pack:
        tokens = [sum(len(row["input_ids"]) for batch in batches for row in batch) for batches in ranks]
        slots = [micro * steps for micro, steps in shares]
        longest = max(LIMIT, *(tokens[i] / max(1, slots[i]) for i in range(len(slots))))
        for mine, weight in zip(tokens, slots, strict=True):
            assert abs(mine - sum(tokens) * weight / sum(slots)) <= 2 * longest, (tokens, slots)


# ---- Shares that change


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 40), st.integers(1, 3), st.data())
def test_what_a_step_trains_does_not_depend_on_shares(
    count: int, batch: int, change: int, world: int, data: st.DataObject
) -> None:
    def shares() -> Shares:
        made = [data.draw(st.tuples(st.integers(1, 16), st.integers(1, 4))) for _ in range(world - 1)]
        return (*made, (batch, data.draw(st.integers(1, 4))))

    first, second = shares(), shares()
    samplers = [GlobalBatchSampler(count, batch, first, rank, 7, turns=4) for rank in range(world)]
    for sampler in samplers:
        sampler.adopt(change, second)
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order, cut = samplers[0].order(), [list(sampler) for sampler in samplers]
        for index in range(samplers[0].steps):
            step = [micro[4 * index : 4 * index + 4] for micro in cut]
            taken = [row for batches in step for micro in batches for row in micro]
            assert taken == order[index * batch : (index + 1) * batch]
            now = second if epoch * samplers[0].steps + index >= change else first
            assert [sum(map(len, batches)) for batches in step] == list(spans(len(taken), now))


def test_a_step_that_is_cut_keeps_its_shares() -> None:
    sampler = GlobalBatchSampler(40, 8, ((4, 1), (4, 1)), 0, 0, turns=2)
    ahead = iter(sampler)
    for _ in range(5):  # the loader has fetched two steps and a micro-step of the third
        next(ahead)
    assert sampler.next_step == 3
    with pytest.raises(ValueError, match="cannot hold from step 2"):
        sampler.adopt(2, ((4, 2), (2, 1)))
    with pytest.raises(ValueError, match="cannot hold"):
        sampler.adopt(3, ((4, 3), (2, 1)))
    with pytest.raises(ValueError, match="cannot hold"):
        sampler.adopt(3, ((2, 2), (2, 1)))
    sampler.adopt(3, ((3, 2), (2, 1)))
    rest = list(ahead)
    assert [len(a) + len(b) for a, b in zip(rest[1::2], rest[2::2], strict=True)] == [6, 6]


# ---- What a rank measures


def test_a_rank_s_time_is_its_own() -> None:
    """As DDP does, something that the backward pass queues waits for other ranks at its end; what computes before that counts."""
    watch, waited = Stopwatch(torch.device("cpu")), []
    lap = Lap(watch)

    class Slow(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return value * 2

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> Any:
            time.sleep(0.05)
            return gradient * 2

    def wait() -> None:
        time.sleep(0.5)
        waited.append(True)

    def reduce(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(wait)

    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(reduce)
    batch = {"rows": [4, 5], "input_ids": torch.zeros(1, 30)}
    for _ in range(2):
        watch.begin(batch)
        total = Slow.apply(weight).sum()
        watch.passed(total)
        (total * 3).backward()
    watch.begin({"rows": [], "input_ids": torch.zeros(1, 2)})
    empty = weight.sum()
    watch.passed(empty)
    empty.backward()
    watch.enter("optimizer")
    found = lap.take()
    assert len(waited) == 3 and [found[name] for name in ("rows", "tokens", "micro_steps")] == [4.0, 60.0, 2.0]
    assert 0.1 <= found["forward"] < 0.25 and 0.1 <= found["backward"] < 0.25
    assert 1.5 <= found["communication"] < 1.8, "the others' time, and a micro-step without rows"
    assert not any(lap.take()[phase] for phase in PHASES)


# ---- What is made of it


def plan(names: Sequence[str], micro: int = 4, steps: int = 4, **changes: Any) -> Plan:
    ranks = tuple(
        RankPlan(rank=rank, device="cpu", device_name=name, micro_batch=micro, accumulation=steps, memory_bytes={}, peak_bytes=0, capacity_bytes=1)
        for rank, name in enumerate(names)
    )  # fmt: skip
    values: dict[str, Any] = {
        "strategy": "ddp",
        "world_size": len(names),
        "backend": "gloo",
        "ranks": ranks,
        "global_batch_size": 32,
    }
    return simple_plan(**(values | changes))


def config(balance: Any = "auto", **train: Any) -> Config:
    return Config(
        model=ModelConfig(name="m"), data=DataConfig(), launch=LaunchConfig(balance=balance), train=TrainConfig(**train)
    )


def window(paces: Sequence[float], shares: Shares, *, steps: int = 10, tokens: float = 100.0) -> list[list[float]]:
    """Returns what ranks of these seconds per row measure in `steps` steps of 32 rows."""
    return [
        [pace * rows * steps, rows * steps, rows * steps * tokens, slots[1] * steps]
        for pace, rows, slots in zip(paces, spans(32, shares), shares, strict=True)
    ]


EQUAL: Shares = ((4, 4), (4, 4))


def test_alike_ranks_keep_equal_shares_through_noise() -> None:
    chance, judge = random.Random(0), Judge(plan(["cpu", "cpu"]), 8)
    for _ in range(500):
        paces = [0.05 * chance.uniform(0.94, 1.06) for _ in range(2)]
        assert judge.look(window(paces, EQUAL), EQUAL) is None
    for _ in range(LOOKS - 1):  # something else ran on one rank's cores for a while
        assert judge.look(window([0.05, 0.1], EQUAL), EQUAL) is None
    assert judge.look(window([0.05, 0.05], EQUAL), EQUAL) is None
    assert judge.look(window([0.05, 0.1], EQUAL), EQUAL) is None


def test_a_rank_that_throttles_gets_fewer_rows_and_then_more_again() -> None:
    judge, shares = Judge(plan(["cpu", "cpu"]), 8), EQUAL
    looks = 0
    while shares == EQUAL:
        shares = judge.look(window([0.05, 0.1], shares), shares) or shares
        looks += 1
    assert looks == LOOKS and spans(32, shares) == (21, 11)
    assert all(micro <= 4 for micro, _ in shares)
    for _ in range(3 * LOOKS):
        assert judge.look(window([0.05, 0.1], shares), shares) is None
    slow = shares
    for _ in range(4 * LOOKS):
        shares = judge.look(window([0.05, 0.05], shares), shares) or shares
    assert slow != shares and max(spans(32, shares)) - min(spans(32, shares)) <= 2


def test_unlike_devices_are_judged_at_once_and_within_their_turns() -> None:
    judge = Judge(plan(["12 GB", "8 GB", "8 GB"], micro=4, steps=3), 6)
    equal: Shares = ((4, 3), (4, 3), (4, 3))
    found = judge.look(window([0.03, 0.1, 0.1], equal), equal)
    assert found is not None and spans(32, found)[0] in (19, 20, 21)
    far = Judge(plan(["12 GB", "8 GB"], micro=2, steps=8), 10)
    shares = far.look(window([0.01, 0.1], ((2, 8), (2, 8))), ((2, 8), (2, 8)))
    assert shares is not None and shares[0] == (2, 10) and sum(spans(32, shares)) == 32, "it may make ten micro-steps"


def test_zero_grows_micro_batches_within_memory_and_never_micro_steps() -> None:
    two = plan(["a", "b"], strategy="zero2")
    ranks = tuple(replace(rank, most_rows=most) for rank, most in zip(two.ranks, (8, 4), strict=True))
    judge = Judge(replace(two, ranks=ranks), 4)
    found = judge.look(window([0.05, 0.1], EQUAL), EQUAL)
    assert found is not None and len({steps for _, steps in found}) == 1 and found[0][1] <= 4
    assert found[0][0] <= 8 and found[1][0] <= 4 and spans(32, found)[0] >= 20
    assert judge.allows(found) and not judge.allows(((9, 4), (4, 4))) and not judge.allows(((4, 4), (4, 3)))
    shrunk = Judge(replace(two, ranks=ranks, recoveries=({"at": 1},)), 4)
    assert not shrunk.allows(found), "where memory ran out, no micro-batch grows"


@settings(deadline=None)
@given(st.integers(1, 80), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6)), min_size=1, max_size=5), st.integers(1, 12))
def test_shares_keep_within_the_micro_steps_that_there_are(rows: int, ranks: list[tuple[int, int]], turns: int) -> None:
    costs = [Cost(fixed_seconds=0.0, row_seconds=pace / 100, most_rows=most) for pace, most in ranks]
    found = within(rows, costs, turns, same_steps=False)
    if sum(cost.most_rows for cost in costs) * turns < rows:
        assert found is None
        return
    assert found is not None
    assert all(micro <= cost.most_rows and steps <= turns for (micro, steps), cost in zip(found, costs, strict=True))
    assert sum(micro * steps for micro, steps in found) >= rows
    plain = share_out(rows, costs, same_steps=False)
    assert found == plain or max(steps for _, steps in plain) > turns


def test_a_change_is_told_in_words() -> None:
    assert (
        describe([0.1, 0.19], (21, 11), (16, 16), "rows")
        == "rank 1 is 1.9 times slower: rows per step 21 + 11 instead of 16 + 16"
    )
    assert on_page("one-gpu-slower-than-the-others", describe([0.1, 0.19], (21, 11), (16, 16), "rows"))
    assert "rank 2 is 2.0 times slower than rank 0: packs per step" in describe([0.1, 0.1, 0.2], (3, 3, 2), (3, 3, 3), "packs")
    assert describe([0.1, 0.101], (16, 16), (21, 11), "rows").startswith(
        "the ranks are about equally fast: rows per step 16 + 16"
    )
    assert describe([1.0] * 9, (4,) * 9, (3, *(4,) * 8), "rows").endswith("rows per step 4 to 4 a rank instead of 3 to 4 a rank")


# ---- A rank that has work keeps some


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_rank_that_works_never_loses_its_last_row_and_comes_back(strategy: Any) -> None:
    two = plan(["fast", "slow"], micro=8, steps=2, strategy=strategy)
    two = replace(two, ranks=tuple(replace(rank, most_rows=32, cost=(0.1, 0.01)) for rank in two.ranks))
    judge, shares = Judge(two, 8), cast(Shares, ((8, 2), (8, 2)))
    for _ in range(6):
        shares = judge.look(window([0.05, 60.0], shares), shares) or shares
        assert min(spans(32, shares)) >= 1, shares
        assert all(micro and micro <= 32 and steps <= 8 for micro, steps in shares)
    assert spans(32, shares)[0] >= 28
    for _ in range(12):
        shares = judge.look(window([0.05, 0.05], shares), shares) or shares
    assert min(spans(32, shares)) >= 10, "it is measured, and gets its part again"


def test_a_rank_that_the_plan_gave_nothing_stays_without() -> None:
    three = plan(["a", "b", "c"], micro=4, steps=4)
    three = replace(three, ranks=(*three.ranks[:2], replace(three.ranks[2], micro_batch=0, accumulation=1)))
    judge, shares = Judge(three, 8), ((4, 4), (4, 4), (0, 1))
    found = judge.look(window([0.05, 0.2, 1.0], shares), shares)
    assert found is not None and spans(32, found)[2] == 0 and min(spans(32, found)[:2]) >= 1


def test_shares_of_a_checkpoint_that_leave_out_a_rank_are_dropped() -> None:
    judge = Judge(plan(["a", "b"]), 8)
    assert judge.allows(((4, 5), (4, 3))) and not judge.allows(((4, 8), (0, 1)))


def test_a_micro_batch_that_was_probed_does_not_grow() -> None:
    two = plan(["a", "b"], strategy="zero2", source="probe")
    two = replace(two, ranks=tuple(replace(rank, most_rows=16) for rank in two.ranks))
    assert [Judge(two, 4).most(rank) for rank in two.ranks] == [4, 4]
    assert [Judge(replace(two, source="formula"), 4).most(rank) for rank in two.ranks] == [16, 16]
