"""Which tokens are trained, for the templates that models use: every answer with the token that ends it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sft_play.data.example import Message
from sft_play.errors import DataError
from sft_play.model.tokenizer import load_tokenizer
from tests.chat_tokenizers import learnt_runs, rows_of
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer

GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

CONVERSATION: list[Message] = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine, thanks."},
    {"role": "user", "content": "And\n\nnow?"},
    {"role": "assistant", "content": "The same:\n\n  still fine."},
]
SINGLE = CONVERSATION[:2]


def tokenizer_of(
    folder: Path, template: str | None, *, added: Sequence[str] = (), bos: str | None = None, eos: str | None = None
) -> Any:
    """Returns the tiny BPE with further special tokens, saved and loaded as a user's would be."""
    build_tokenizer(folder, template=False)
    made = AutoTokenizer.from_pretrained(folder)
    made.add_special_tokens({"additional_special_tokens": [*added]})
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token:
            made.add_special_tokens({name: token})
    made.chat_template = template
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def test_the_default_template_ends_turns_with_eos_where_chatml_marks_are_unknown(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        ["plain text"],
        trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert learnt_runs(tokenizer, rows_of(tokenizer, SINGLE)) == ["Fine, thanks.</s>"]


def test_a_conversation_that_the_template_refuses_names_its_roles(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, GEMMA, added=["<start_of_turn>", "<end_of_turn>"], bos="<bos>", eos="<eos>")
    with pytest.raises(DataError, match=r"system, user.*System role not supported"):
        rows_of(tokenizer, [{"role": "system", "content": "Be brief."}, *SINGLE])


def test_a_template_without_an_end_of_turn_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(DataError, match="no end-of-turn token"):
        rows_of(tokenizer, SINGLE)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[-2:] %}{{ m['content'] + '<|im_end|>' }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | length }}{{ m['content'] + '<|im_end|>' }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] + m['content'] + '<|im_end|>' }}{% endfor %}",
    ],
    ids=["forgets earlier turns", "depends on the answer", "repeats the answer"],
)
def test_a_template_that_changes_turns_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mask cannot be exact"):
        rows_of(tokenizer_of(tmp_path, template), CONVERSATION)


def test_spaces_within_an_answer_are_trained_where_offsets_are_trimmed(tmp_path: Path) -> None:
    """GPT-NeoX's tokenizer gives a token of white space an empty span."""
    from tokenizers import processors

    tokenizer = tokenizer_of(tmp_path, CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "one\n\n\n\ttwo   \n"
    assert learnt_runs(tokenizer, rows_of(tokenizer, [SINGLE[0], {"role": "assistant", "content": answer}])) == [
        f"{answer}<|im_end|>"
    ]
