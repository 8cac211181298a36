"""What a rank tells of its collective operations when it stands still, and where NCCL's own dumps go. gloo's, since NCCL needs a GPU: torch
writes both by one template (FlightRecorderDetail.hpp)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.launch.environment import dump_variables
from sft_play.training import heartbeat
from tests.unit.test_plan_make import plan_of


def test_operations_are_counted_over_all_groups_and_kept_as_json(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed

    before = heartbeat.collectives_begun() or 0
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        other = distributed.new_group([0])
        for group in (None, None, other):
            distributed.all_reduce(torch.ones(4), group=group)
        assert heartbeat.collectives_begun() == before + 3
        heartbeat.keep_trace(tmp_path / "trace.json")
    finally:
        distributed.destroy_process_group()
    kept = json.loads((tmp_path / "trace.json").read_text())
    assert "gloo:all_reduce" in json.dumps(kept["entries"])


def test_nccls_own_dumps_go_to_the_logs_of_the_run(tmp_path: Path) -> None:
    several = plan_of("2xH100", command_strategy="auto")
    ours = dump_variables(several, tmp_path, {})
    assert ours == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-dump-rank"}
    assert "TORCH_FR_DUMP_TEMP_FILE" not in dump_variables(several, tmp_path, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"})
    assert dump_variables(plan_of(), tmp_path, {}) == {}
