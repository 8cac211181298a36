"""Every command that the program prints works as typed in the folder where it was printed, for a run in `runs/` and for
a moved one.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sft_play.runs.folder import RunFolder
from sft_play.text import as_typed
from tests.conftest import Done, environment, run_program
from tests.tiny_models import build_tiny_llama

PRINTED = re.compile(r"""make ([a-z-]+(?: (?:'[A-Z_]+=[^']*'|[A-Z_]+=(?:'[^']*'|"[^"]*"|[^\s;,`")]+)))+)""")
REFUSED = {"stop": "nothing trains"}
"""Of a run that has ended, and says so: the command found it."""


class Desk:
    """A working folder with the default `runs/` in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.env = {name: text for name, text in environment(cache, folder).items() if name != "RUNS_DIR"}

    def typed(self, *words: str) -> Done:
        return run_program(list(words), self.env, cwd=self.folder, stdin="")

    def follow(self, text: str) -> set[str]:
        """Type every command of a text; return their names."""
        printed = dict.fromkeys(PRINTED.findall(text))
        for line in printed:
            words = [word.replace("$$", "$") for word in shlex.split(line)]  # as make takes it
            done = self.typed(
                "infer" if words[0] == "serve" else words[0], *words[1:]
            )  # `serve` continues; both find the same model
            if words[0] in REFUSED:
                done.refused(2, REFUSED[words[0]])
            else:
                assert done.code == 0, (line, done.err)
        return {line.split()[0] for line in printed}


@pytest.fixture(scope="module")
def desk(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    build_tiny_llama(folder / "model")
    rows = [{"prompt": f"What is {i}?", "completion": f"{i} is a number."} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my.yaml").write_text(
        "model: {name: model, max_seq_len: 128}\ntuning: {mode: lora}\ndata: {train_path: data.jsonl, validation:"
        " 0.2}\ntrain: {max_steps: 2, global_batch_size: 4, save_steps: 1, eval_strategy: 'no',"
        " generation_max_new_tokens: 4}\n"
    )
    return Desk(folder, cache)


@pytest.mark.broad
def test_printed_commands_work_where_they_were_printed(desk: Desk) -> None:
    done = desk.typed("train", "CONFIG=my.yaml", "RUN_NAME=one")
    assert done.code == 0, done.err
    assert desk.follow(done.out) >= {"watch", "stop", "infer", "eval"}
    taken = desk.typed("train", "CONFIG=my.yaml", "RUN_NAME=one")
    assert taken.code == 2 and desk.follow(taken.err) == {"resume"}

    moved = desk.folder / "else where" / "moved $1"
    moved.parent.mkdir()
    (desk.folder / "runs" / "one").rename(moved)
    done = desk.typed("resume", "RUN=else where/moved $1", "TRAIN_MAX_STEPS=3")
    assert done.code == 0, done.err
    assert desk.follow(done.out) >= {"watch", "stop", "infer", "eval"}
    merged = desk.typed("merge", "RUN=else where/moved $1", "OUT=else where/merged")
    assert merged.code == 0, merged.err
    assert desk.follow(merged.err) == {"infer", "serve"}
    assert desk.follow(desk.typed("stamp", "RUN=else where/moved $1").out) == {"train"}

    alone = desk.typed("train", "CONFIG=my.yaml", "DATA_VALIDATION=null", "TRAIN_MAX_STEPS=1", "RUN_NAME=alone")
    assert alone.code == 0 and "make infer RUN=alone" in alone.out and "make eval" not in alone.out, "no rows to score"

    (desk.folder / "sweep.yaml").write_text("keys: {train.learning_rate: [1e-3, 1e-4]}\n")
    words = ["SWEEP=sweep.yaml", "TRAIN_MAX_STEPS=1", "TRAIN_EVAL_STRATEGY=steps", "TRAIN_EVAL_STEPS=1"]
    swept = desk.typed("sweep", "CONFIG=my.yaml", *words)
    assert swept.code == 0, swept.err
    unscored = [line for line in swept.err.splitlines() if "has no scores" in line]
    assert len(unscored) == 2 and desk.follow("\n".join(unscored)) == {"eval"}
    assert desk.follow(swept.out.rpartition("with answers")[2]) == {"compare"}


def test_a_run_is_typed_by_its_name_only_where_that_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNS_DIR", raising=False)
    for folder in ("runs/one", "elsewhere/one", "here", "elsewhere/it's $1"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
    assert RunFolder(Path("runs/one")).typed == RunFolder(tmp_path / "runs" / "one").typed == "one"
    assert RunFolder(Path("here")).typed == "here"
    assert RunFolder(Path("here")).again == "here-again"
    assert RunFolder(Path("elsewhere/.it's  $1")).again == "it-s-1-again", "a name that a run may have"
    assert RunFolder(Path("elsewhere/one")).typed == "elsewhere/one", "another run has that name"
    assert RunFolder(Path("elsewhere/it's $1")).typed == as_typed("elsewhere/it's $1") == "'elsewhere/it'\"'\"'s $$1'"
