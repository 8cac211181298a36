"""Unequal ranks: each rank times its own work alone, and shares change for good reasons only."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from sft_play.data.batches import Shares
from sft_play.plan.batch import spans
from sft_play.plan.plan import Plan
from sft_play.training.balance import LOOKS, Judge, describe
from sft_play.training.metrics import PHASES, Lap, Stopwatch
from tests.documents import on_page
from tests.plans import rank_plan, simple_plan


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


def test_a_change_is_said_in_words() -> None:
    said = describe([0.1, 0.19], (21, 11), (16, 16), "rows")
    assert said == "rank 1 is 1.9 times slower than rank 0: rows per step 21 + 11 instead of 16 + 16"
    assert on_page("one-gpu-slower-than-the-others", said)
    said = describe([0.1, 0.101], (16, 16), (21, 11), "rows")
    assert said == "the ranks are about equally fast: rows per step 16 + 16 instead of 21 + 11"
