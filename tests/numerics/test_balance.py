"""Unequal ranks: gradients stay exact for any slots, each rank times its own work alone, and shares change for good reasons only."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sft_play.data.batches import Collator, GlobalBatchSampler, Shares
from sft_play.plan.batch import spans
from sft_play.plan.plan import Plan
from sft_play.training.balance import LOOKS, Judge, describe
from sft_play.training.loss import IDLE, label_tokens, step_totals, token_loss_sum
from sft_play.training.metrics import PHASES, Lap, Stopwatch
from sft_play.training.ranks import Ranks
from tests.documents import on_page
from tests.numerics.test_layouts import VOCABULARY, random_model
from tests.plans import rank_plan, simple_plan

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
        rank_plan(rank, device_name=name, micro_batch=micro, accumulation=steps)
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
