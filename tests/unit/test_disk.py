"""How much room a launch asks for."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sft_play.config.schema import Config, ModelConfig, TrainConfig
from sft_play.errors import HardwareError
from sft_play.launch.run_folder import disk_refusals_told, record_event, require_disk_space
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.documents import on_page
from tests.plans import rank_plan, simple_plan

ONE = 2**20


def plan(one: int = ONE) -> Plan:
    """A plan whose checkpoints have this many bytes."""
    return simple_plan(ranks=(rank_plan(memory_bytes={"trained": one // 2, "optimizer": one // 2}),))


def config(limit: int | None) -> Config:
    return Config(model=ModelConfig(name="x"), train=TrainConfig(save_total_limit=limit))


def test_a_disk_that_is_too_small_is_refused_before_the_launch(tmp_path: Path) -> None:
    with pytest.raises(HardwareError) as refused:
        require_disk_space(plan(10**18), config(2), RunFolder(tmp_path))
    assert on_page("no-space-left", refused.value.message)


def test_a_disk_that_takes_no_more_is_told_with_its_place(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    with pytest.raises(HardwareError, match="no space is left on the disk") as refused, disk_refusals_told(run):
        Path("/dev/full").write_bytes(b"x")
    assert (refused.value.exit_code, refused.value.place) == (3, str(run.path))
    assert refused.value.hint == "free some space, then: the same command again"
    run.path.mkdir()
    record_event(run, "started")
    with pytest.raises(HardwareError) as outside, disk_refusals_told(run):
        raise OSError(errno.EROFS, "Read-only file system", "/elsewhere/cache")
    assert outside.value.render().startswith("error: /elsewhere/cache: cannot be written: Read-only file system")
    assert outside.value.hint is not None and outside.value.hint.endswith("then: make resume RUN=mine")
