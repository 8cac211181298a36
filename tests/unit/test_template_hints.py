"""A refusal by a chat template has a hint, and a row or template that follows it is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sft_play.data import Message
from sft_play.errors import DataError
from tests.chat_tokenizers import load_with, rows_of, save_tokenizer

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
}
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LATE = (
    "{% for m in messages %}"
    + TURN
    + "{% if m['role'] == 'assistant' and not loop.last %} (earlier){% endif %}<|im_end|>\n{% endfor %}"
    + ASK
)
NO_END = "{% for m in messages %}" + TURN + "\n{% endfor %}" + ASK
NO_PROMPT = "{{ messages[0]['content'] }}{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + ASK
NO_ROLE = (
    "{% for m in messages %}{{ {'user': '<|im_start|>user\n', 'assistant': '<|im_start|>assistant\n'}[m['role']] +"
    " m['content'] }}<|im_end|>\n{% endfor %}" + ASK
)
CALLS = (
    "{{ (tools or []) | tojson }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] %}{{"
    " m['tool_calls'] | tojson }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}" + ASK
)


class Case(NamedTuple):
    """What is refused, a part of its hint, and what follows the hint."""

    hint: str
    template: str | None
    messages: Sequence[Message]
    followed: Sequence[Message] | None = None
    """Another conversation; `None`: the named template `chatml`, or `qwen3` for tools."""
    tools: Sequence[Any] | None = None
    loss_on: str = "assistant"
    then_loss_on: str = "assistant"


CASES = {
    "the end of a turn in an answer": Case(
        "remove it from the text", None, [USER, {**ANSWER, "content": "a<|im_end|>b"}], [USER, ANSWER]
    ),
    "no generation prompt": Case(
        """end it with `{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}`""",
        "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}",
        [USER, ANSWER],
    ),
    "another name of the text": Case(
        "it must write `content` of each of `messages`",
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.text }}<|im_end|>\n{% endfor %}" + ASK,
        [USER, ANSWER],
    ),
    "no end of turn": Case("`data.chat_template`", NO_END, [USER, ANSWER]),
    "an answer first": Case(
        "put a question before it", NO_PROMPT, [ANSWER, USER, ANSWER], [USER, ANSWER, USER, ANSWER]
    ),
    "an answer first, not learnt": Case(
        "`train: false`", NO_PROMPT, [ANSWER, USER, ANSWER], [{**ANSWER, "train": False}, USER, ANSWER]
    ),
    "a role that it does not know": Case(
        "`data.chat_template`", NO_ROLE, [{"role": "system", "content": "s"}, USER, ANSWER]
    ),
    "a question to learn": Case(
        "`train.loss_on: all`", None, [{**USER, "train": True}, ANSWER], [{**USER, "train": True}, ANSWER],
        then_loss_on="all",
    ),
    "tools that are not written": Case("`data.chat_template: qwen3`", LATE, [USER, CALL], tools=[TOOL]),
    "or no tools": Case("omit the key", None, [USER, ANSWER], [USER, ANSWER], tools=[TOOL]),
    "words next to calls": Case(
        "remove the text from that turn", CALLS, [USER, {**CALL, "content": "words"}], [USER, CALL], tools=[TOOL]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(
        tmp_path_factory.mktemp("hints") / "t", "llama3", special=["<|im_start|>", "<|im_end|>"], eos="<|im_end|>"
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_that_follow_a_hint_are_accepted(name: str, saved: Path) -> None:
    case = CASES[name]
    tokenizer = load_with(saved, "chatml") if case.template is None else load_with(saved, text=case.template)
    with pytest.raises(DataError) as caught:
        rows_of(tokenizer, case.messages, case.tools, case.loss_on)
    assert case.hint in (caught.value.hint or "")
    tools = None if case.hint.startswith("omit the key") else case.tools
    if case.followed is None:
        tokenizer = load_with(saved, "qwen3" if case.tools else "chatml")
    assert rows_of(tokenizer, case.followed or case.messages, tools, case.then_loss_on)
