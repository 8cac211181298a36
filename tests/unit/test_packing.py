"""Packs: no token lost, none twice, none too long; the rows of each step stay; and when the plan packs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft_play.config.schema import Config, ModelConfig, TrainConfig
from sft_play.data.batches import GlobalBatchSampler
from sft_play.errors import UserError
from sft_play.launch.recovery import announcement, remedy
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.batch import Slots
from sft_play.plan.epoch import RowOrder, best_fit, most_packs
from sft_play.plan.plan import LaunchRequest, Plan, setup_of
from sft_play.plan.request import Request
from sft_play.plan.shape import ModelShape
from tests.plans import CPU, plan_of, prepared_rows

LIMIT = 64
lengths_within = st.lists(st.integers(1, LIMIT), min_size=1, max_size=80)


@given(lengths_within)
def test_packs_hold_every_row_once_and_never_too_much(lengths: list[int]) -> None:
    packs = best_fit(lengths, LIMIT)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[row] for row in pack) <= LIMIT for pack in packs)
    assert -(-sum(lengths) // LIMIT) <= len(packs) <= most_packs(len(lengths), sum(lengths), LIMIT)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], int, list[Slots]]:
    """Draw (lengths, global batch, slots of unequal ranks) as planned: enough slots for the largest number of packs."""
    lengths, batch = draw(lengths_within), draw(st.integers(1, 24))
    micros = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    bound = most_packs(min(batch, len(lengths)), sum(sorted(lengths)[-batch:]), LIMIT)
    return lengths, batch, [(micro, -(-bound // sum(micros))) for micro in micros]


@given(worlds(), st.integers(0, 3))
def test_packed_steps_have_the_rows_of_unpacked_ones(world: tuple[list[int], int, list[Slots]], epoch: int) -> None:
    lengths, batch, slots = world
    samplers = [
        GlobalBatchSampler(RowOrder(rows=len(lengths), seed=0), batch, slots, rank, lengths=lengths, pack_tokens=LIMIT)
        for rank in range(len(slots))
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    order, accumulation = samplers[0].order(epoch), slots[0][1]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])} == {samplers[0].steps * accumulation}
    for step in range(samplers[0].steps):
        turns = list(zip(*(share[step * accumulation : (step + 1) * accumulation] for share in shares), strict=True))
        rows = Counter(row for turn in turns for micro in turn for row in micro)
        assert rows == Counter(order[step * batch : (step + 1) * batch])
        busy = [any(turn) for turn in turns]
        assert busy == sorted(busy) and busy[-1]  # what is empty on every rank comes first, the update last
        for turn in turns:
            for micro, (packs, _) in zip(turn, slots, strict=True):
                assert len(best_fit([lengths[row] for row in micro], LIMIT)) <= packs
        assert sum(busy) <= -(-len(best_fit([lengths[r] for r in rows], LIMIT)) // sum(m for m, _ in slots))


SHAPE = ModelShape(
    model_type="llama",
    hidden_size=256,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn_size=688,
    vocab_size=2048,
    tied=True,
    max_positions=4096,
)


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Plan a run over rows of these lengths."""

    def plan_with(lengths: list[int], family: str = "llama", **changes: Any) -> Plan:
        (tmp_path / "lengths.i32").write_bytes(array("i", lengths).tobytes())
        (tmp_path / "labels.i32").write_bytes(array("i", [length // 2 for length in lengths]).tobytes())
        data = prepared_rows(
            len(lengths),
            path=str(tmp_path),
            longest=max(lengths),
            most_labels=max(lengths) // 2,
            fingerprint=str(lengths),
            tokens=sum(lengths),
            label_tokens=sum(lengths) // 2,
        )
        return plan_of(
            max_seq_len=512, data=data, request_fields={"shape": replace(SHAPE, model_type=family)}, **changes
        )

    return plan_with


def reasons(plan: Plan) -> str:
    return "\n".join(plan.reasons.values())


def test_auto_packs_where_it_saves_micro_steps(planned: Callable[..., Plan]) -> None:
    plan = planned([100, 60] * 200, batch_size=1)
    assert (
        plan.pack_tokens == 512
        and plan.layout == "flattened"
        and plan.row_tokens == 512
        and plan.ranks[0].micro_batch == 1
    )
    assert setup_of(plan).pack_tokens and plan.label_share == 0.5
    assert plan.global_batch_size == 32 and plan.steps_per_epoch == 13
    # 16 x 100 + 16 x 60 = 2560 tokens on average; at most 32 x 100 in a step: 2 x 3200 / 512 - 1, rounded up.
    assert plan.ranks[0].accumulation == 12
    assert "packing on: 32 rows in " in reasons(plan) and "micro-steps instead of 32 = " in reasons(plan)
    off = planned([100, 60] * 200, batch_size=1, packing="off")
    assert off.pack_tokens == 0 and off.ranks[0].accumulation == 32 and "packing" not in reasons(off)
    assert plan.ranks[0].peak_bytes > off.ranks[0].peak_bytes  # a pack is 512 tokens, a row 100


def test_auto_packs_neither_single_micro_steps_nor_for_small_savings(planned: Callable[..., Plan]) -> None:
    whole = planned([100, 60] * 200, batch_size=32)
    assert whole.pack_tokens == 0 and "packing" not in reasons(whole)
    long_rows = planned([400, 500] * 200, batch_size=1)
    assert long_rows.pack_tokens == 0 and "worth it from 10% fewer" in reasons(long_rows)
    bloom = planned([100, 60] * 200, family="bloom", batch_size=1)
    assert bloom.pack_tokens == 0 and "packing off: `bloom` is not among the families" in reasons(bloom)


def test_typed_packing_is_obeyed_or_refused(planned: Callable[..., Plan]) -> None:
    plan = planned([400, 500] * 200, packing="on")
    assert plan.pack_tokens == 512 and "as configured" in reasons(plan)
    with pytest.raises(UserError, match=r"`train\.packing` is `on`, but `bloom`"):
        planned([100], family="bloom", packing="on")
    obeyed = planned([100, 60] * 200, packing="on", grad_accum=3)
    assert obeyed.ranks[0].accumulation == 3 and obeyed.ranks[0].micro_batch == 4  # 12 packs at most / 3


def test_a_pack_that_does_not_fit_is_unpacked(planned: Callable[..., Plan]) -> None:
    plan = planned([100, 60] * 200, batch_size=1)
    outcome = Outcome(
        code=75, rank=0, cause=OUT_OF_MEMORY, message="error: memory ran out", doing={"phase": "training"}
    )
    config = Config(model=ModelConfig(name="m", max_seq_len=512))
    request = Request(config=config, hardware=CPU, shape=SHAPE)
    launch = remedy(request, plan, outcome, 0)
    assert isinstance(launch, LaunchRequest) and launch.unpack and not launch.force_checkpointing
    packed = replace(request, config=replace(config, train=TrainConfig(packing="on")))
    launch = remedy(packed, plan, outcome, 0)
    assert isinstance(launch, LaunchRequest) and launch.force_checkpointing and not launch.unpack
    after = planned([100, 60] * 200, unpack=True, batch_size=1)
    assert "packing on -> off" in announcement(config, plan, after, outcome, None, 1)
