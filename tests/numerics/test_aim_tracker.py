"""`train.report_to: aim` (B15). Aim does not fit our pinned versions, so these tests run only if it was installed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from sft_play.training.trackers import IDS, AimTracker


def test_a_resumed_run_continues_in_its_tracker_run_and_logs_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aim: Any = pytest.importorskip("aim")
    from aim.sdk.index_manager import RepoIndexManager

    monkeypatch.setenv("AIM_REPO", str(tmp_path))
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    run.config.write_text(json.dumps({"config": {"train": {"epochs": 2}}}), encoding="utf-8")
    for first, loss in ((0, 4.0), (2, 3.0)):
        tracker = AimTracker(run)
        state = SimpleNamespace(global_step=first, epoch=0.5)
        tracker.on_train_begin(None, state, None)
        for step in range(first + 1, first + 4):
            state.global_step = step
            each = {"rank_loss": [loss, loss + 1], "node_cpu_percent": [7.0]}
            tracker.on_log(None, state, None, {"loss": loss, "eval_loss": loss, "text": "no number", **each})
        tracker.on_train_end(None, state, None)
    repo = aim.Repo(str(tmp_path))
    [name] = repo.list_all_runs()
    assert json.loads((run.path / IDS).read_text()) == {"aim": name}
    RepoIndexManager.get_index_manager(repo).index(name)  # as `aim up` does
    [tracked] = list(aim.Repo(str(tmp_path)).iter_runs())
    assert (
        tracked.name == "one" and tracked["config"]["train"]["epochs"] == 2 and tracked.get("__system_params") is None
    )
    frames = {(m.name, *sorted(m.context.to_dict().items())): m.dataframe() for m in tracked.metrics()}
    train, losses = ("subset", "train"), [4.0, 4.0, 3.0, 3.0, 3.0]
    values = {
        ("loss", train): losses,
        ("loss", ("subset", "eval")): losses,
        ("loss", ("rank", 0), train): losses,
        ("loss", ("rank", 1), train): [loss + 1 for loss in losses],
        ("cpu_percent", ("node", 0), train): [7.0] * 5,
    }
    assert {name: list(frame["value"]) for name, frame in frames.items()} == values
    assert all(list(frame["step"]) == [1, 2, 3, 4, 5] for frame in frames.values())
