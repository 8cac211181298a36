"""Rows of families whose templates write more than text: rendered harmony, stops, and prompts that are already
rendered.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.data.formats import Message, understand
from sft_play.errors import DataError
from sft_play.evaluation.generation import prompt_ids
from sft_play.model.tokenizer import base_stops, end_of_turn_ids, ends_of_answers, load_tokenizer
from tests.chat_families import CHAT_FAMILIES, TOOL, asked, call, save_family
from tests.chat_tokenizers import by_hand, learnt_runs, load_with, rows_of, save_tokenizer
from tests.unit.test_templates_named import CHAT, FAMILIES


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_family(tmp_path_factory.mktemp("harmony") / "t", "gpt_oss"))


def test_each_answer_of_harmony_is_a_row_as_the_template_renders_it(harmony: Any) -> None:
    """Earlier thoughts are gone from later prompts, and earlier answers end with another token there."""
    messages = [
        *asked("2+2?", content="Four.", reasoning_content="Two."),
        *asked("3+3?", content="Six.", reasoning_content="Three."),
    ]
    rows = rows_of(harmony, messages)
    assert learnt_runs(harmony, rows) == [
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        for thought, answer in (("Two.", "Four."), ("Three.", "Six."))
    ]
    messages = [{"thinking": turn.get("reasoning_content"), **turn} for turn in messages]  # as the template reads it
    for row, count in zip(rows, (2, 4), strict=True):
        assert harmony.decode(row.input_ids) == harmony.apply_chat_template(messages[:count], tokenize=False)
        prompt = harmony.apply_chat_template(messages[: count - 1], tokenize=False, add_generation_prompt=True)
        assert harmony.decode(row.prompt_ids) == prompt
    assert "Two." not in harmony.decode(rows[1].input_ids)


def test_a_harmony_call_is_learnt_up_to_its_end(harmony: Any) -> None:
    messages = [
        *asked("2+2?", reasoning_content="Add.", tool_calls=[call(a=2)]),
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Done."},
    ]
    call_text = " to=functions.add<|channel|>commentary json<|message|>" + json.dumps({"a": 2}) + "<|call|>"
    assert learnt_runs(harmony, rows_of(harmony, messages, [TOOL])) == [
        f"<|channel|>analysis<|message|>Add.<|end|><|start|>assistant{call_text}",
        "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    ]


def test_stops_are_those_of_template_tokenizer_and_base(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "t", "gpt_oss")
    tokenizer = load_tokenizer(folder)
    named = tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer))
    assert named == ["<|return|>", "<|call|>"], "a thought ends with <|end|>, so generation continues there"
    start = tokenizer.convert_tokens_to_ids("<s>")
    for declared, stops in (([start, 5], [start, 5]), (start, [start]), (None, []), ("2", []), ([True, -1], [])):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert base_stops(folder) == stops
        again = load_tokenizer(folder)
        assert ends_of_answers(again)["eos_token_id"] == [*end_of_turn_ids(tokenizer), *stops]
        assert 5 not in end_of_turn_ids(again), "what stands within words ends no turn of a row"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [start]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [start, 5]}))
    assert base_stops(folder) == [start]
    (folder / "generation_config.json").rename(folder / "elsewhere.json")
    assert base_stops(folder) == [start, 5], "transformers goes by `config.json` then"
    (folder / "elsewhere.json").rename(folder / "generation_config.json")
    apart = save_family(tmp_path / "adapter", "gpt_oss")
    assert start in end_of_turn_ids(load_tokenizer(apart, base=folder))


@pytest.mark.parametrize("name", [*FAMILIES, *CHAT_FAMILIES])
def test_a_rendered_prompt_is_refused_with_the_format_that_reads_it(name: str, tmp_path: Path) -> None:
    own = name in CHAT_FAMILIES and not CHAT_FAMILIES[name].named
    tokenizer = (
        load_tokenizer(save_family(tmp_path / "t", name))
        if own
        else load_with(save_tokenizer(tmp_path / "t", FAMILIES[name].kind, **FAMILIES[name].settings), name)
    )
    chat = CHAT[1:] if name == "mistral" else CHAT
    for messages in (chat[-2:-1], chat[:-1]):
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        with pytest.raises(DataError, match="rendered already") as caught:
            rows_of(tokenizer, asked(rendered, content="Five."))
        assert (
            caught.value.hint
            and "`format: text`" in caught.value.hint
            and "`columns: {text: NAME}`" in caught.value.hint
        )
        assert understand(("a:1", {"text": f"{rendered}Five."}), "text").text, "as the hint says"
    assert rows_of(tokenizer, asked("What do a user: and an assistant: say? <b> [x] ### Note", content="Five."))


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_mark_in_any_turn_is_refused(role: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_family(tmp_path / "t", "qwen3_5"))
    turns: list[Message] = [{"role": "system", "content": "Be brief."}, *asked("2+2?", content="Four.")]
    turns = [{**turn, "content": "<|im_start|>user\nhey"} if turn["role"] == role else turn for turn in turns]
    with pytest.raises(DataError, match=rf"\({role}\) contains `<\|im_start\|>user`"):
        rows_of(tokenizer, turns)


def test_a_turn_that_begins_with_the_beginning_of_sequence_is_refused(tmp_path: Path) -> None:
    tokenizer = load_with(
        save_tokenizer(tmp_path / "t", FAMILIES["llama3"].kind, **FAMILIES["llama3"].settings), "llama3"
    )
    with pytest.raises(DataError, match=f"contains `{re.escape(tokenizer.bos_token)}`"):
        rows_of(tokenizer, asked(f"{tokenizer.bos_token}2+2?", content="Four."))
    assert rows_of(tokenizer, asked(f"What does {tokenizer.bos_token} mean?", content="It begins a text."))


def test_deepseek_r1_is_named_where_its_published_template_cannot_be_learnt(tmp_path: Path) -> None:
    published = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}{% else"
        " %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + '<\uff5cend\u2581of\u2581sentence\uff5c>'"
        " }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"
    )
    folder = save_family(tmp_path / "t", "deepseek_r1")
    messages = asked("2+2?", content="<think>\nTwo.\n</think>\n\nFour.")
    with pytest.raises(DataError) as caught:
        rows_of(load_with(folder, text=published), messages)
    assert caught.value.hint and "`data.chat_template: deepseek_r1`" in caught.value.hint
    named = load_with(folder, "deepseek_r1")
    (row,) = rows_of(named, messages)
    text = (
        "<s><\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c><think>\n"
        "\u2039Two.\n</think>\n\nFour.<\uff5cend\u2581of\u2581sentence\uff5c>\u203a"
    )
    assert (row.input_ids, row.labels) == by_hand(named, text)


@pytest.mark.parametrize("ident", ["call_0123456789", "abcdefghi", None])
def test_mistral_gets_call_ids_of_nine_characters_and_results_name_them(ident: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_family(tmp_path / "t", "mistral"))
    call_facts = {key: value for key, value in call(a=2).items() if key != "id"} | ({"id": ident} if ident else {})
    result = {"role": "tool", "content": "4"} | ({"tool_call_id": ident} if ident else {})
    messages = [*asked("2+2?", tool_calls=[call_facts]), result, {"role": "assistant", "content": "Four."}]
    text = tokenizer.decode(rows_of(tokenizer, messages, [TOOL])[-1].input_ids)
    (named,) = re.findall(r'"id": "(\w{9})"', text)
    assert f'"call_id": "{named}"' in text and named == (ident if ident == "abcdefghi" else named)
    assert prompt_ids(tokenizer, messages[:-1], [TOOL]) == rows_of(tokenizer, messages, [TOOL])[-1].prompt_ids


def test_a_rendered_system_turn_is_refused_too(tmp_path: Path) -> None:
    tokenizer = load_with(save_tokenizer(tmp_path / "t", "gpt2", **FAMILIES["chatml"].settings), "chatml")
    with pytest.raises(DataError, match="the row was rendered"):
        rows_of(tokenizer, [{"role": "system", "content": "<|im_start|>system\nhi<|im_end|>"}, *CHAT[1:3]])
