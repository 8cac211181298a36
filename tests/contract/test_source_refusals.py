"""`make data` on data of many kinds: what was read as what, and one clear error for each thing that cannot be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done, call_program, environment, run_program
from tests.hub import COMMIT, FilesHandler, serve

pytestmark = pytest.mark.slow


NO_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "")


def prepare(
    folder: Path, model: Path | str, sources: list[dict[str, Any]], *words: str, env: Mapping[str, str] | None = None
) -> Done:
    config = folder / "x.yaml"
    config.write_text(json.dumps({"model": {"name": str(model), "max_seq_len": 256}, "data": {"sources": sources}}))
    variables, typed = environment(folder / "cache", folder / "runs", env), ["data", f"CONFIG={config}", *words]
    # The hub's library reads its variables when it is imported.
    return run_program(typed, variables, timeout=240) if env else call_program(typed, variables)


def write(path: Path, content: bytes | list[dict[str, Any]]) -> str:
    path.write_bytes(
        content if isinstance(content, bytes) else "".join(json.dumps(row) + "\n" for row in content).encode()
    )
    return str(path)


def test_all_bad_files_are_reported_together_with_their_places(tiny: Path, tmp_path: Path) -> None:
    good = {"question": "q", "answer": "a"}
    cut = write(tmp_path / "cut.jsonl.gz", gzip.compress(json.dumps(good).encode() * 50)[:-12])
    mixed = write(tmp_path / "mixed.jsonl", [good, {"prompt": "q", "completion": "a"}])
    order = write(tmp_path / "order.jsonl", [{"messages": [{"role": "user", "content": "q"}] * 2}])
    ragged = write(tmp_path / "ragged.csv", b"question,answer\na,b,c\n")
    latin = write(tmp_path / "latin.jsonl", b'{"question": "caf\xe9", "answer": "a"}\n')
    done = prepare(tmp_path, tiny, [{"path": path} for path in (mixed, cut, order, ragged, latin)])
    done.refused(
        4,
        f"error: {cut}: is not what its ending `.jsonl.gz` says, or is damaged",
        f"error: {mixed}:2: format `question_answer` needs `answer`, `question`; the columns are `prompt`,"
        " `completion`",
        "this row looks like prompt_completion, but a source has one format",
        f"error: {order}:1: the roles are out of order: user after user (turn 2)",
        f"error: {ragged}:2: the row has another number of columns than the header: 3 and not 2",
        f"error: {latin}:1: is not UTF-8 text: byte 18 of the line",
    )
    assert done.err.count("error: ") == 5


@pytest.mark.long
def test_a_hub_dataset_is_downloaded_or_streamed_and_its_faults_are_reported(tiny: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"question": f"q{n}", "answer": "a", "n": n}) + "\n" for n in range(9)).encode()
    hub = {"path": "nobody/small"}
    files = {"data/train.jsonl": rows, "README.md": b"# Small\n"}
    with serve(FilesHandler, name="nobody/small", files=files) as address:
        env = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
            **NO_PROXIES,
        }
        sources: list[dict[str, Any]] = [
            {**hub, "name": "a", "config": "default", "revision": COMMIT, "split": "train[:5]"},
            {**hub, "name": "b", "streaming": True, "filter": "n >= 5", "rows": 2},
        ]
        done = prepare(tmp_path, tiny, sources, "JSON=1", env=env)
        assert done.code == 0, done.err
        assert [source["kept"] for source in done.json["train"]["sources"]] == [5, 2]
        assert [source["content"] for source in done.json["train"]["split"]["sources"]] == [f"hub:{COMMIT}"] * 2
        cached = prepare(tmp_path, tiny, sources, "JSON=1", env=env)
        assert cached.json == done.json, "the commit is part of what is kept"
        wrong = [{**hub, "revision": "nope"}, {**hub, "split": "nope"}, {**hub, "config": "nope"}]
        done = prepare(tmp_path, tiny, wrong, env=env)
    done.refused(4, "404", "Unknown split", "'nope' not found. Available: ['default']")


def test_faults_of_rows_and_their_text_are_reported_together_and_only_once(tiny: Path, tmp_path: Path) -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "note", "user", "assistant", "note")]
    stop = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    data = write(
        tmp_path / "a.jsonl", [{"messages": turns} for turns in (chat[:3], chat[3:], [*chat[:2], *chat[3:]], stop)]
    )
    done = prepare(tmp_path, tiny, [{"path": data}])
    rows, answer = (
        "`messages[2].role` is `note` (3 such rows; the first is here)",
        "the answer of turn 2 contains `<|im_end|>`",
    )
    done.refused(4, rows, f"error: {data}:4: {answer}")
    assert done.err.count("error: ") == 2


@pytest.mark.parametrize("what", ["model", "data"])
@pytest.mark.parametrize(
    "env",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "closed"],
)
@pytest.mark.broad_but("closed-data", "offline-model")
def test_a_hub_id_without_a_network_is_refused(what: str, env: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    model, path = ("nobody/nothing", data) if what == "model" else (tiny, "nobody/nothing")
    done = prepare(tmp_path, model, [{"path": path}], env={"HF_HOME": str(tmp_path / "hf"), **NO_PROXIES, **env})
    done.refused(4, "error: nobody/nothing: ", "the hub cannot be reached")
