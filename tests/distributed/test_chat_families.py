"""A model that has learnt its rows scores 1, whatever its family's marks for thoughts and calls: `train`, `eval`,
`infer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft_play.data.formats import Message
from tests.chat_families import CHAT_FAMILIES, TOOL, asked, call, save_family
from tests.families import tiny_model
from tests.places import Place

pytestmark = [pytest.mark.slow, pytest.mark.broad]
BASE_STOP = 7


def rows_of_family(name: str) -> list[dict[str, Any]]:
    """Return four conversations: with a thought, after an earlier answer, with a call, and its result."""
    family = CHAT_FAMILIES[name]

    def thought(text: str) -> dict[str, Any]:
        return {"reasoning_content": text} if family.thoughts else {}

    plain: list[list[Message]] = [
        asked("red?", content="rose", **thought("a flower")),
        [*asked("blue?", content="sea", **thought("deep")), *asked("green?", content="grass", **thought("low"))],
    ]
    if not family.tools:
        return [
            {"messages": messages}
            for messages in (*plain, asked("grey?", content="stone"), asked("white?", content="snow"))
        ]
    result = {"role": "tool", "content": "4", "tool_call_id": "abcdefghi"}
    called = asked("two?", tool_calls=[call(a=2, b=2)])
    return [
        *({"messages": messages} for messages in plain),
        {"messages": called, "tools": [TOOL]},
        {"messages": [*called, result, {"role": "assistant", "content": "four", **thought("done")}], "tools": [TOOL]},
    ]


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in CHAT_FAMILIES if name != "gpt_oss"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt_oss", *OTHERS])
def test_a_model_that_writes_its_rows_scores_1(name: str, tmp_path: Path) -> None:
    place, family = Place(tmp_path), CHAT_FAMILIES[name]
    folder = tmp_path / "model"
    model = tiny_model(family.model, hidden_size=64)
    model.generation_config.eos_token_id = [BASE_STOP]
    model.save_pretrained(folder)
    save_family(folder, name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of_family(name)))
    named = f", chat_template: {family.named}" if family.named else ""
    place.config.write_text(
        f"model: {{name: {folder}, max_seq_len: 512}}\ntuning: {{mode: full}}\ndata: {{train_path: {rows}, val_path:"
        f" {rows}{named}}}\ntrain: {{max_steps: 90, global_batch_size: 8, learning_rate: 0.01, warmup_steps: 5,"
        " generation_max_new_tokens: 60,\n        eval_strategy: 'no', save_strategy: 'no'}\neval: {metrics:"
        " [exact_match, rougeL]}\n"
    )
    place.train("one")
    scores = place.scores("RUN=one")
    lines = [json.loads(line) for line in (place.folder_of("one", 90) / "predictions.jsonl").read_text().splitlines()]
    assert scores["loss"] < 0.1
    assert [line["answer"] for line in lines] == [line["reference"] for line in lines]
    assert scores["exact_match"]["mean"] == scores["rougeL"]["mean"] == 1.0
    assert "rose" in {line["reference"] for line in lines}
    if family.tools:
        assert '{"name": "add", "arguments": {"a": 2, "b": 2}}' in {line["answer"] for line in lines}
    answer = place.call("infer", "RUN=one", "PROMPT=red?")
    assert answer.out.strip() == "rose"
    assert ("thought: a flower" in answer.err) == family.thoughts
    published = json.loads((tmp_path / "runs" / "one" / "model" / "generation_config.json").read_text())
    assert BASE_STOP in published["eos_token_id"] and len(published["eos_token_id"]) >= 2
