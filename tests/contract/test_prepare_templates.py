"""A run's chat template, system turn and style, from its configuration to what it prepares and answers with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import read_config
from sft_play.data.chat import template_sha256
from sft_play.errors import UserError
from sft_play.evaluation.answering import prompt_ids
from sft_play.model import tokenizer as tokenizer_module
from sft_play.model.tokenizer import end_of_turn_ids, load_tokenizer
from sft_play.prepare import prepare_run
from sft_play.runs.prepared import Prepared
from tests.contract.test_prepare import pairs, rows_of, write_rows, write_run

pytestmark = pytest.mark.slow


@pytest.fixture
def prepare(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = write_rows(tmp_path / "rows.jsonl", pairs(3))

    def run(name: str, *lines: str) -> Prepared:
        folder = write_run(tmp_path / name, [f"model.name: {tiny}", "model.max_seq_len: 128", f"data.train_path: {data}", *lines])
        assert read_config(folder.config).config.data.train_path == str(data)
        return prepare_run(folder)

    return run


def test_what_is_prepared_is_what_the_run_answers_with(prepare: Any) -> None:
    prepared = prepare("r", "data.chat_template: alpaca", "data.system: Be brief.", 'data.style.user_suffix: " /now"')
    tokenizer = load_tokenizer(prepared.model.path, prepared.model.chat)
    question = pairs(1)[0]["prompt"]
    expected = f"Be brief.\n\n### Instruction:\n{question} /now\n\n### Response:\n"
    row = rows_of(prepared.train.path)[0]
    assert tokenizer.decode(row["prompt_ids"]) == expected
    assert row["prompt_ids"] == prompt_ids(tokenizer, [{"role": "user", "content": question}])
    assert row["input_ids"][: len(row["prompt_ids"])] == row["prompt_ids"]


@pytest.mark.parametrize(("template", "said"), [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "was not done after"),
    ("{{ 'a' * 10 ** 15 }}", "more memory than there is"),
])  # fmt: skip
def test_no_command_waits_for_a_template(template: str, said: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "SECONDS", 0.3)
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "a"}]
    for act in (lambda: prompt_ids(tokenizer, turns), lambda: end_of_turn_ids(tokenizer), lambda: template_sha256(tokenizer)):
        with pytest.raises(UserError, match=said) as caught:
            act()
        assert caught.value.exit_code == 4
