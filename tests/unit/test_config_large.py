"""Values that no memory, no file system and no stack holds: one clear error each, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError
from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp


@pytest.mark.parametrize("text", ["[" * 50_000, '{"world_size": 1, "num_no', "{}", "[]", "5"])
@pytest.mark.parametrize("kind", [Plan, Prepared, Stamp])
def test_a_file_of_a_run_that_is_cut_or_no_such_file(kind: type[Plan | Prepared | Stamp], text: str, tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        kind.load(tmp_path if kind is Stamp else path)
    assert caught.value.place == str(path)
    assert json.dumps(caught.value.message)
