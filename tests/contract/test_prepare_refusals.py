"""What preparation refuses before it loads anything large, and what `lookup` sees behind folders and globs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config, save_config
from sft_play.config.schema import Config
from sft_play.prepare import main
from tests.conftest import ROOT, Done, called, environment

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"How much is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(20)]

Start = Callable[..., Done]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def configure(folder: Path, data: Path | str, model: Path | str) -> Config:
    """Writes `run/config.json` under `folder`."""
    path = folder / "run.yaml"
    path.write_text(f"model:\n  name: {model}\n  max_seq_len: 64\ndata:\n  train_path: {data}\n", encoding="utf-8")
    loaded = load_config(path, environ={})
    (folder / "run").mkdir(exist_ok=True)
    save_config(loaded, folder / "run" / "config.json")
    return loaded.config


@pytest.fixture
def start(tmp_path: Path, tiny: Path) -> Start:
    """Prepares data for a model, in this process unless `env` is given."""

    def run(data: Path | str, model: Path | str = tiny, env: Mapping[str, str] | None = None) -> Done:
        configure(tmp_path, data, model)
        inherited = environment(tmp_path / "cache", tmp_path / "runs", {"HF_HOME": str(tmp_path / "hf"), **(env or {})})
        kept = {
            name: value for name, value in inherited.items() if name.lower() not in ("http_proxy", "https_proxy", "all_proxy")
        }
        arguments = ["--run", str(tmp_path / "run")]
        if env is None:
            done = called(lambda: main(arguments), kept)
        else:  # the hub's library reads its variables when it is imported
            ended = subprocess.run(
                [sys.executable, "-m", "sft_play.prepare", *arguments],
                capture_output=True, text=True, timeout=120, env=kept, cwd=ROOT, check=False,
            )  # fmt: skip
            done = Done(ended.returncode, ended.stdout, ended.stderr)
        assert "Traceback" not in done.err
        assert done.code == 0 or not (tmp_path / "run" / "prepared.json").exists()
        return done

    return run


def test_faults_of_rows_and_of_their_text_are_told_together_and_one_that_moves_only_once(start: Start, tmp_path: Path) -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "note", "user", "assistant", "note")]
    stop = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    data = write_rows(tmp_path / "a.jsonl", [{"messages": turns} for turns in (chat[:3], chat[3:], [*chat[:2], *chat[3:]], stop)])
    done = start(data)
    assert done.code == 4 and done.err.count("error: ") == 2, done.err
    assert "`messages[2].role` is `note` (3 such rows; the first is here)" in done.err
    assert f"error: {data}:4: the answer of turn 2 holds `<|im_end|>`" in done.err


@pytest.mark.parametrize("what", ["model", "data"])
@pytest.mark.parametrize(
    "env", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}], ids=["offline", "closed"]
)
def test_a_hub_id_without_a_network_is_refused(what: str, env: dict[str, str], start: Start, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", ROWS)
    done = start(data, "nobody/nothing", env) if what == "model" else start("nobody/nothing", env=env)
    assert done.code == 4
    assert "error: nobody/nothing: " in done.err
    assert "the hub cannot be reached" in done.err
