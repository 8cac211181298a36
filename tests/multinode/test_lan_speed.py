"""Three hosts with links of 1 Gb/s: shares that follow what each computes (B11); a pipeline's bytes as the interfaces
count them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.plan import Plan
from tests.conftest import metrics
from tests.home_machines import Home, home
from tests.lan import lan
from tests.multinode.test_by_hand import Lan2, all_ended_with_0
from tests.quota import move, quota
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.long

SPEEDS = (0.3, 0.3, 0.15)
"""Shares of a core: the third host has half the speed of the others, and two cores carry all with room for everything
else.
"""
GLOBAL_BATCH, LAST = 24, 8
"""Rows of a step; steps at the end of a run whose speed counts."""
STEPS = {"off": 14, "auto": 48}
"""Alike devices share out again after three looks, at steps 5, 15 and 25 or later."""
HEAVIER: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
"""Large enough that a rank computes for most of a step, and for the 2 s between two looks that a measure needs."""


def write_rows(folder: Path, count: int, words: int) -> None:
    """Write rows that differ in their number only."""
    rows = [{"prompt": "say", "completion": f"I say {i:02d} " + "so " * words} for i in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def quotas(machines: Home) -> Iterator[Callable[[], None]]:
    """Yield a function that puts the one worker of each host under its quota."""
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(quota(share)) for share in SPEEDS]

        def hold() -> None:
            for k, group in enumerate(groups):
                (worker,) = machines.net.workers(k)
                move(worker, group)

        yield hold


def trained_at_unequal_speeds(machines: Home, balance: str) -> list[dict[str, Any]]:
    """Train on three hosts of which the third has half the speed from its first steps on; return the logged steps."""
    steps = STEPS[balance]
    words = (f"LAUNCH_BALANCE={balance}", f"TRAIN_MAX_STEPS={steps}", "TRAIN_SAVE_STRATEGY=no")
    with quotas(machines) as hold:
        machines.train(balance, *words)
        machines.until_step(balance, 1)
        hold()
        machines.finish(seconds=600)
    rows = metrics(machines.run(balance).path)
    assert len(rows) == steps and {sum(row["rank_rows"]) for row in rows} == {GLOBAL_BATCH}
    return rows


def part_of(rank: int, rows: list[dict[str, Any]]) -> float:
    """Return a rank's part of the trained tokens."""
    return float(sum(row["rank_tokens"][rank] for row in rows) / sum(sum(row["rank_tokens"]) for row in rows))


@pytest.mark.quiet
def test_a_host_at_half_speed_gets_fewer_rows_and_all_are_faster(tmp_path: Path) -> None:
    """The kernel limits the workers: compare tokens per second with and without `launch.balance`, and each rank's
    count.
    """
    with home(tmp_path, build_tiny_llama(tmp_path / "heavier", **HEAVIER)) as machines:
        write_rows(machines.own(0, "models"), 48, 60)
        text = machines.config.read_text().replace("max_seq_len: 64", "max_seq_len: 256")
        machines.config.write_text(text.replace("global_batch_size: 6", f"global_batch_size: {GLOBAL_BATCH}"))
        by_balance = {balance: trained_at_unequal_speeds(machines, balance) for balance in STEPS}
        machines.all_free(0, 1, 2)
        changes = [
            json.loads(line) for line in machines.run("auto").metrics.read_text().splitlines() if '"balance"' in line
        ]
    assert all(row["rank_rows"] == [8, 8, 8] for row in by_balance["off"])
    assert changes and changes[-1]["from_step"] <= STEPS["auto"] - LAST, changes
    last = {balance: rows[-LAST:] for balance, rows in by_balance.items()}
    assert part_of(2, last["off"]) == pytest.approx(1 / 3, abs=0.02)
    assert 0.1 < part_of(2, last["auto"]) < 0.27, changes
    assert min(part_of(rank, last["auto"]) for rank in (0, 1)) > 0.34, changes
    speeds = {balance: statistics.median(row["tokens_per_second"] for row in rows) for balance, rows in last.items()}
    assert speeds["auto"] >= 1.3 * speeds["off"], (speeds, changes)


FIXED = ("TUNING_MODE=full", "LAUNCH_BALANCE=off", "TRAIN_SAVE_STRATEGY=no", "TRAIN_GLOBAL_BATCH_SIZE=6")


def bytes_of(hosts: Lan2, name: str, steps: int, *words: str) -> int:
    """Return what the interfaces of three hosts sent in a whole run of full tuning."""
    before = sum(map(hosts.net.sent_bytes, range(3)))
    hosts.start_all(*FIXED, *words, f"TRAIN_MAX_STEPS={steps}", name=name, nodes=3)
    all_ended_with_0(hosts.end_all())
    assert metrics(hosts.run(name).path)[-1]["step"] == steps
    return sum(map(hosts.net.sent_bytes, range(3))) - before


def test_three_hosts_send_half_with_fp16_and_a_twelfth_with_16_local_steps(tmp_path: Path) -> None:
    """What a start sends, the whole model once, is what ordinary runs of 8 and of 32 steps have in common."""
    ways = {"none": (), "fp16": ("LAUNCH_COMPRESSION=fp16",), "local": ("LAUNCH_LOCAL_STEPS=16",)}
    with lan(tmp_path / "lan", nodes=3) as net:
        hosts = Lan2(
            net,
            tmp_path,
            build_tiny_llama(tmp_path / "wider", hidden_size=128, intermediate_size=256, num_hidden_layers=4),
        )
        sent = {name: bytes_of(hosts, name, 32, *words) for name, words in ways.items()}
        start = (4 * bytes_of(hosts, "start", 8) - sent["none"]) // 3
    sent_by_setting = {name: count - start for name, count in sent.items()}
    assert 0 < start < sent["none"] / 8, (start, sent)
    assert 0.45 < sent_by_setting["fp16"] / sent_by_setting["none"] < 0.56, (start, sent_by_setting)
    assert sent_by_setting["none"] / sent_by_setting["local"] > 12, (start, sent_by_setting)


@pytest.mark.quiet
def test_a_pipeline_sends_hidden_states_and_shards_send_weights(tmp_path: Path) -> None:
    """Bytes and time of a step are those of the plan; FSDP2 takes many times both."""
    slow = (
        "LAUNCH_NETWORK=20Mbit",
        "LAUNCH_SLOW_NETWORK=allow",
        "TRAIN_BATCH_SIZE=1",
        "TRAIN_LOGGING_STEPS=1",
        "TRAIN_PACKING=off",
    )
    measured: dict[str, tuple[float, float]] = {}
    with lan(tmp_path / "lan", nodes=3) as net:
        hosts = Lan2(net, tmp_path, build_tiny_llama(tmp_path / "heavier", **HEAVIER))
        write_rows(tmp_path, 24, 40)
        for k in range(3):
            net.rate(k, 20)
        for way in ("fsdp2", "pipeline"):
            sent = [bytes_of(hosts, f"{way}{steps}", steps, *slow, f"LAUNCH_STRATEGY={way}") for steps in (1, 3)]
            run = hosts.run(f"{way}3")
            plan, rows = Plan.load(run.plan), metrics(run.path)
            measured[way] = ((sent[1] - sent[0]) / 2, statistics.median(row["step_seconds"] for row in rows[1:]))
    assert measured["fsdp2"][0] > 10 * measured["pipeline"][0] and measured["fsdp2"][1] > 5 * measured["pipeline"][1], (
        measured
    )
    # Over two boundaries hidden states one way and their gradients back; and the gradient of the tied embedding both
    # ways.
    tokens = statistics.mean(row["tokens_per_second"] * row["step_seconds"] for row in rows)
    assert measured["pipeline"][0] == pytest.approx((4 * tokens + 2 * 1024) * HEAVIER["hidden_size"] * 4, rel=0.1)
    assert measured["pipeline"][1] == pytest.approx(plan.communication_seconds, rel=0.2)
