"""How much room a launch asks for."""

from __future__ import annotations

from pathlib import Path

from sft_play.config.schema import Config, ModelConfig, TrainConfig
from sft_play.launch.disk import SPARE_BYTES, needed_bytes
from sft_play.plan.plan import Plan, RankPlan
from sft_play.runs.folder import RunFolder
from tests.plans import simple_plan

ONE = 2**20


def plan(one: int = ONE) -> Plan:
    """A plan whose checkpoints have this many bytes."""
    rank = RankPlan(
        rank=0, device="cpu", device_name="cpu", micro_batch=1, accumulation=1, memory_bytes={"trained": one // 2, "optimizer": one // 2},
        peak_bytes=0, capacity_bytes=1,
    )  # fmt: skip
    return simple_plan(ranks=(rank,))


def saved(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "model.safetensors").write_bytes(b"1" * ONE)


def config(limit: int | None) -> Config:
    return Config(model=ModelConfig(name="x"), train=TrainConfig(save_total_limit=limit))


def test_a_run_that_goes_on_needs_no_room_for_the_checkpoints_that_it_has(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert needed_bytes(plan(), config(2), run) == SPARE_BYTES + 5 * ONE, "two, the best, a new one and the model"
    saved(run, 2)
    assert needed_bytes(plan(), config(2), run) == SPARE_BYTES + 4 * ONE
    saved(run, 4, 6, 8, 10, 12)
    assert needed_bytes(plan(), config(2), run) == SPARE_BYTES + 2 * ONE, "a new one and the model have no space yet"
    assert needed_bytes(plan(), config(None), run) == SPARE_BYTES + 2 * ONE
