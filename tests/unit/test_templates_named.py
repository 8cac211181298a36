"""The templates that are chosen by name, against rows written by hand, with tokenizers that split text as the families'
do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.names import template_names
from sft_play.data import IGNORED, Message
from sft_play.errors import DataError
from tests.chat_tokenizers import Kind, by_hand, learnt_runs, load_with, rows_of, save_tokenizer

CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Five,\n\n  of course."},
]
THOUGHT: list[Message] = [
    {**turn, "reasoning_content": "Hm."} if turn["role"] == "assistant" else turn for turn in CHAT
]
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"


class Family(NamedTuple):
    """A tokenizer that a template is made for, and the rows that `CHAT` must give: `\u2039` and `\u203a` enclose what
    is learnt.
    """

    kind: Kind
    rows: Sequence[str]
    settings: Mapping[str, Any]


FAMILIES = {
    "chatml": Family(
        "gpt2",
        ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
         "\u2039Four.<|im_end|>\u203a\n"
         "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n\u2039Five,\n\n  of course.<|im_end|>\u203a"],
        {"special": ["<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>"},
    ),
    "llama3": Family(
        "llama3",
        ["<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n\u2039Four.<|eot_id|>\u203a"
         "<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n\u2039Five,\n\n  of course.<|eot_id|>\u203a"],
        {"special": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
         "bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "adds_bos": True},
    ),
    "gemma": Family(
        "gemma",
        ["<bos><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n"
         "\u2039Four.<end_of_turn>\u203a\n"
         "<start_of_turn>user\nAnd then?<end_of_turn>\n<start_of_turn>model\n\u2039Five,\n\n"
         "  of course.<end_of_turn>\u203a"],
        {"special": ["<start_of_turn>", "<end_of_turn>"], "bos": "<bos>", "eos": "<eos>", "adds_bos": True},
    ),
    "mistral": Family(
        "llama2",
        [
            "<s>[INST] Be brief.\n\n2+2?[/INST]\u2039 Four.</s>\u203a[INST] And then?[/INST]\u2039 Five,\n\n"
            "  of course.</s>\u203a"
        ],
        {"special": ["[INST]", "[/INST]"], "bos": "<s>", "eos": "</s>", "adds_bos": True},
    ),
    "qwen3": Family(
        "llama3",
        ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
         "<|im_start|>assistant\n\u2039<think>\n\n</think>\n\nFour.<|im_end|>\u203a",
         "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
         "Four.<|im_end|>\n"
         "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n\u2039<think>\n\n</think>\n\nFive,\n\n"
         "  of course.<|im_end|>\u203a"],
        {"special": ["<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>"},
    ),
    "deepseek_r1": Family(
        "llama3",
        ["<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c><think>\n"
         "\u2039Hm.\n</think>\n\nFour.<\uff5cend\u2581of\u2581sentence\uff5c>\u203a",
         "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c>Four."
         "<\uff5cend\u2581of\u2581sentence\uff5c>"
         "<\uff5cUser\uff5c>And then?<\uff5cAssistant\uff5c><think>\n"
         "\u2039Hm.\n</think>\n\nFive,\n\n  of course.<\uff5cend\u2581of\u2581sentence\uff5c>\u203a"],
        {"special": ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"], "adds_bos": True,
         "bos": "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "eos": "<\uff5cend\u2581of\u2581sentence\uff5c>"},
    ),
    "phi3": Family(
        "llama2",
        ["<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n\u2039Four.<|end|>\u203a\n"
         "<|user|>\nAnd then?<|end|>\n<|assistant|>\n\u2039Five,\n\n  of course.<|end|>\u203a"],
        {
            "special": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], "bos": "<s>", "eos": "<|endoftext|>",
            "rstrip": True
        },
    ),
    "zephyr": Family(
        "llama2",
        ["<|system|>\nBe brief.</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n\u2039Four.</s>\u203a\n"
         "<|user|>\nAnd then?</s>\n<|assistant|>\n\u2039Five,\n\n  of course.</s>\u203a"],
        {"bos": "<s>", "eos": "</s>"},
    ),
    "alpaca": Family(
        "gpt2",
        ["Be brief.\n\n### Instruction:\n2+2?\n\n### Response:\n\u2039Four.</s>\u203a\n\n"
         "### Instruction:\nAnd then?\n\n### Response:\n\u2039Five,\n\n  of course.</s>\u203a"],
        {"eos": "</s>"},
    ),
    "vicuna": Family(
        "llama2",
        [
            "<s>Be brief. USER: 2+2? ASSISTANT:\u2039 Four.</s>\u203aUSER: And then? ASSISTANT:\u2039 Five,\n\n"
            "  of course.</s>\u203a"
        ],
        {"bos": "<s>", "eos": "</s>", "adds_bos": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: load_with(save_tokenizer(folder / name, family.kind, **family.settings), name)
        for name, family in FAMILIES.items()
    }


def test_every_named_template_is_tested() -> None:
    assert sorted(FAMILIES) == template_names()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_mask_of_each_template_is_the_one_written_by_hand(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer, family = tokenizers[name], FAMILIES[name]
    rows = rows_of(tokenizer, THOUGHT if name == "deepseek_r1" else CHAT)
    assert [(row.input_ids, row.labels) for row in rows] == [by_hand(tokenizer, row) for row in family.rows]
    assert [row.reference for row in rows][-1] == "Five,\n\n  of course."
    asked = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert rows[-1].prompt_ids == list(asked), "what transformers itself gives a model"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_loss_on_last_and_on_all_learns_what_they_name(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    (last,) = rows_of(tokenizer, CHAT, loss_on="last")
    assert last.labels == [IGNORED] * len(last.prompt_ids) + last.input_ids[len(last.prompt_ids) :]
    (everything,) = rows_of(tokenizer, CHAT, loss_on="all")
    assert everything.labels == everything.input_ids == last.input_ids


ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen3": "<|im_end|>",
    "phi3": "<|end|>",
    "deepseek_r1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
TEXT = st.text(alphabet="ab \n\t.1\u00e9\u4e16\U0001f600'<>", min_size=1, max_size=12).filter(
    lambda value: bool(value.strip())
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_conversation_learns_exactly_its_answers_and_ends(data: st.DataObject, tokenizers: dict[str, Any]) -> None:
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    tokenizer, end = tokenizers[name], ENDS.get(name, "</s>")
    answers = data.draw(st.lists(TEXT, min_size=1, max_size=3))
    messages: list[Message] = []
    for answer in answers:
        messages += [{"role": "user", "content": data.draw(TEXT)}, {"role": "assistant", "content": answer}]
    rows = rows_of(tokenizer, messages)
    learnt_texts = learnt_runs(tokenizer, rows)
    assert len(learnt_texts) == len(answers)
    assert all(text.endswith(end) for text in learnt_texts)
    # White space around an answer is the template's and the decoder's matter, between its words it is not.
    expected = sorted(
        text.removesuffix(end).removeprefix("<think>\n").removeprefix("\n</think>\n\n").strip() for text in learnt_texts
    )
    assert expected == sorted(answer.strip() for answer in answers)
    for row in rows:
        assert row.input_ids[: len(row.prompt_ids)] == row.prompt_ids
        assert all(label in (IGNORED, token) for token, label in zip(row.input_ids, row.labels, strict=True))


def test_a_vocabulary_without_the_end_mark_uses_eos(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "gpt2", eos="</s>")
    tokenizer = load_with(folder, "chatml")
    assert learnt_runs(tokenizer, rows_of(tokenizer, CHAT)) == ["Four.</s>", "Five,\n\n  of course.</s>"]


def test_a_vocabulary_without_the_marks_is_refused_with_templates_that_fit(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "gpt2", eos="</s>")
    with pytest.raises(DataError, match=r"needs tokens.*start_header_id") as caught:
        load_with(folder, "llama3")
    assert caught.value.hint is not None and "chatml" in caught.value.hint and "gemma" not in caught.value.hint


@pytest.mark.parametrize("adds", [True, False])
def test_any_template_begins_with_bos_just_where_the_tokenizer_puts_one(tmp_path: Path, adds: bool) -> None:
    folder = save_tokenizer(tmp_path, "gpt2", bos="<s>", eos="</s>", adds_bos=adds)
    for name in ("chatml", "zephyr", "alpaca", "vicuna"):
        tokenizer = load_with(folder, name)
        row = rows_of(tokenizer, CHAT)[-1]
        assert row.input_ids.count(tokenizer.bos_token_id) == int(adds)
        assert (row.input_ids[0] == tokenizer.bos_token_id) == adds


def test_alpacas_sentence_precedes_a_conversation_without_a_system_turn(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["alpaca"]
    row = rows_of(tokenizer, CHAT[1:3])[0]
    assert tokenizer.decode(row.input_ids) == f"{ALPACA}### Instruction:\n2+2?\n\n### Response:\nFour.</s>"


R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + m['content'] }}{%"
    " endif %}{% if m['role'] == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + m['content'].split('</think>')[-1] +"
    " eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{%"
    " endif %}"
)
"""As published, without system turns and tools: no answer shows its thought."""


def test_a_distilled_r1_is_refused_with_its_own_template_and_trained_with_the_named_one(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "llama3", **FAMILIES["deepseek_r1"].settings)
    with pytest.raises(DataError) as caught:
        rows_of(load_with(folder, text=R1), THOUGHT[1:3])
    assert "`data.chat_template: deepseek_r1`" in (caught.value.hint or "")
    tokenizer = load_with(folder, "deepseek_r1")
    for answer in (THOUGHT[2], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."}):
        (row,) = rows_of(tokenizer, [CHAT[1], answer])
        assert (
            row.prompt_ids
            == load_with(folder, text=R1).apply_chat_template([CHAT[1]], add_generation_prompt=True)["input_ids"]
        )
        assert learnt_runs(tokenizer, [row]) == [f"Hm.\n</think>\n\nFour.{tokenizer.eos_token}"]
