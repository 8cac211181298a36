"""`data.chat_template`, `data.system`, `data.style`, `train: false`: every program uses what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataConfig, StyleConfig
from sft_play.data import Message
from sft_play.data.chat import Encoded
from sft_play.data.prepare import ids_of_new_tokens
from sft_play.errors import DataError, UserError
from sft_play.evaluation.generation import prompt_ids
from sft_play.model.tokenizer import chat_format, load_tokenizer
from tests.chat_tokenizers import learnt_runs, load_with, outcome_of, rows_of, save_tokenizer
from tests.tiny_models import CHAT_TEMPLATE

END = "<|im_end|>"
CHAT: list[Message] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Five."},
]
STYLE = StyleConfig(
    system_prefix="<<", system_suffix=">>", user_prefix="Q: '{{ \u00e9 }}'\n", user_suffix=" \\ #\U0001f600"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    return save_tokenizer(place, "llama3", special=["<|im_start|>", END], eos=END, template=CHAT_TEMPLATE)


def learnt(tokenizer: Any, rows: Sequence[Encoded]) -> list[str]:
    return [run.removesuffix(END) for run in learnt_runs(tokenizer, rows)]


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ({"chat_template": "chatlm"}, "is neither a template's name nor a file", "did you mean `chatml`? names are "),
        ({"chat_template": "qwen"}, "is neither a template's name nor a file", "did you mean `qwen3`? names are "),
        (
            {"chat_template": "nothing-like-it"},
            "is neither a template's name nor a file",
            "names are alpaca, chatml, deepseek_r1",
        ),
        ({"chat_template": "templates/absent.jinja"}, "cannot be read: No such file", "paths count from the folder"),
        ({"system": " "}, r"`data\.system` is empty", "omit it"),
    ],
)
def test_an_unknown_template_and_an_empty_system_turn_are_refused(
    data: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        chat_format(DataConfig(**data))
    assert hint in (caught.value.hint or "")


def test_an_end_that_the_folder_does_not_call_special_ends_turns(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    original = AutoTokenizer.from_pretrained(folder)
    original.add_tokens(["<turn_end>"])
    original.chat_template = CHAT_TEMPLATE.replace(END, "<turn_end>")
    original.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert learnt_runs(tokenizer, rows_of(tokenizer, CHAT[:2])) == ["Four.<turn_end>"]


def test_a_syntax_error_names_the_line_and_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}\n{{ m['content'] }\n{% endfor %}")
    with pytest.raises(DataError, match=r"syntax error: .*`\{\{ m\['content'\] \}`") as caught:
        chat_format(DataConfig(chat_template=str(path)))
    assert caught.value.place == f"{path}:2" and caught.value.hint


def test_a_chat_template_file_is_used_and_saved_as_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token }}{% endfor %}{{ 'assistant:\n' if"
        " add_generation_prompt }}"
    )
    chat = chat_format(DataConfig(chat_template=str(path)))
    path.unlink()
    tokenizer = load_tokenizer(folder, chat)
    (row,) = rows_of(tokenizer, CHAT)
    assert (
        tokenizer.decode(row.input_ids)
        == f"user:\n2+2?{END}assistant:\nFour.{END}user:\nAnd then?{END}assistant:\nFive.{END}"
    )
    assert learnt(tokenizer, [row]) == ["Four.", "Five."]


def test_system_and_style_are_the_same_in_training_and_inference(folder: Path, tmp_path: Path) -> None:
    """This includes the folder that a run publishes, which needs no configuration."""
    tokenizer = load_with(folder, system="Be brief.", style=STYLE)
    (row,) = rows_of(tokenizer, CHAT)
    expected = (
        f"<|im_start|>system\n<<Be brief.>>{END}\n<|im_start|>user\nQ: '{{{{ \u00e9 }}}}'\n2+2? \\ #\U0001f600{END}\n"
    )
    assert tokenizer.decode(row.input_ids).startswith(expected)
    assert prompt_ids(tokenizer, CHAT[:-1]) == row.prompt_ids == row.input_ids[: len(row.prompt_ids)]
    tokenizer.save_pretrained(tmp_path)
    assert prompt_ids(load_tokenizer(tmp_path), CHAT[:-1]) == row.prompt_ids
    own = tokenizer.decode(rows_of(tokenizer, [{"role": "system", "content": "Mine."}, *CHAT])[0].input_ids)
    assert "<<Mine.>>" in own and "Be brief." not in own


def flagged(*flags: bool | None) -> list[Message]:
    return [turn if flag is None else {**turn, "train": flag} for turn, flag in zip(CHAT, flags, strict=True)]


def test_turns_with_train_false_are_not_learnt(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert learnt(tokenizer, rows_of(tokenizer, flagged(None, False, None, None))) == ["Five."]
    (row,) = rows_of(tokenizer, flagged(None, None, None, False))
    assert learnt(tokenizer, [row]) == ["Four."] and row.reference == "Four."  # nothing depends on what follows
    everything = "".join(learnt_runs(tokenizer, rows_of(tokenizer, flagged(False, None, None, None), loss_on="all")))
    assert everything.startswith(f"<|im_start|>user\n{END}\n<|im_start|>assistant\nFour.{END}")
    assert "Four." not in "".join(
        learnt_runs(tokenizer, rows_of(tokenizer, flagged(None, False, None, None), loss_on="all"))
    )


@pytest.mark.parametrize(
    ("flags", "loss_on", "message"),
    [
        ((None, False, None, False), "assistant", "every answer has `train: false`"),
        ((None, None, None, False), "last", "the last answer has `train: false`"),
        ((False, False, False, False), "all", "every turn has `train: false`"),
        ((True, None, None, None), "assistant", "only answers are learnt"),
    ],
)
def test_flags_that_leave_nothing_are_refused(flags: Any, loss_on: str, message: str, folder: Path) -> None:
    outcome = outcome_of(load_tokenizer(folder), messages=flagged(*flags), loss_on=loss_on)
    assert outcome.error is not None and message in outcome.error.message and outcome.error.place == "rows.jsonl:3"


@pytest.mark.parametrize("words", [f"Four.{END}", f"Fo{END}ur"])
def test_an_answer_that_ends_its_turn_itself_is_refused(words: str, folder: Path) -> None:
    with pytest.raises(DataError, match=r"turn 2 contains `<\|im_end\|>`"):
        rows_of(load_tokenizer(folder), [CHAT[0], {"role": "assistant", "content": words}])


def test_a_conversation_may_begin_with_an_answer(folder: Path) -> None:
    greeting: Message = {"role": "assistant", "content": "Hello!"}
    tokenizer = load_with(folder, text="{% if messages[0]['role'] == 'tool' %}{% endif %}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match="begins with an answer"):
        rows_of(tokenizer, [greeting, *CHAT])
    assert learnt(tokenizer, rows_of(tokenizer, [{**greeting, "train": False}, *CHAT])) == ["Four.", "Five."]


EXACT = "mask cannot be exact"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", "no end-of-turn token"),
        ("{% for m in messages[-2:] %}{{ m['content'] + '<|im_end|>' }}{% endfor %}", EXACT),
        ("{% for m in messages %}{{ m['content'] | length }}{{ m['content'] + '<|im_end|>' }}{% endfor %}", EXACT),
        ("{% for m in messages %}{{ m['content'] + m['content'] + '<|im_end|>' }}{% endfor %}", EXACT),
        (
            CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"),
            "does not begin turn 4 with its own generation prompt",
        ),
        ("{{ raise_exception('No roles') }}" + CHAT_TEMPLATE, r"\(user, assistant, user\): No roles"),
    ],
    ids=[
        "has no end",
        "forgets earlier turns",
        "depends on the answer",
        "repeats the answer",
        "opens a thought",
        "refuses the roles",
    ],
)
def test_a_template_without_an_exact_mask_is_refused(template: str, message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(load_with(folder, text=template), CHAT)


def test_a_template_that_refuses_its_new_tokens_is_one_error(folder: Path) -> None:
    tokenizer = load_with(folder, text="{{ raise_exception('No roles') }}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"does not accept this conversation \(user, assistant\): No roles"):
        ids_of_new_tokens(["<tool>"], tokenizer)


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_template_that_leaves_out_a_turn_is_refused_for_rows_that_have_it(loss_on: str, folder: Path) -> None:
    asked = CHAT_TEMPLATE.replace("%}{{", "%}{% if message['role'] != 'system' %}{{", 1).replace(
        "{% endfor", "{% endif %}{% endfor"
    )
    tokenizer = load_with(folder, text=asked)
    with pytest.raises(DataError, match=r"does not write turn 1 \(system\)"):
        rows_of(tokenizer, [{"role": "system", "content": "Be brief."}, *CHAT], loss_on=loss_on)
    assert rows_of(tokenizer, CHAT, loss_on=loss_on)
    changed = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('/think', '')")
    assert rows_of(load_with(folder, text=changed), [{"role": "system", "content": "Be brief. /think"}, *CHAT])


def test_spaces_within_an_answer_are_trained_where_offsets_are_trimmed(folder: Path) -> None:
    """GPT-NeoX's tokenizer gives a token of white space an empty span."""
    from tokenizers import processors

    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "one\n\n\n\ttwo   \n"
    assert learnt_runs(tokenizer, rows_of(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}])) == [
        f"{answer}<|im_end|>"
    ]
