"""Which tokens are trained, for the templates that models use: every answer with the token that ends it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sft_play.config.schema import Config, ModelConfig
from sft_play.data.chat import IGNORED, Encoded
from sft_play.data.encode import Encoder
from sft_play.data.example import Message
from sft_play.errors import DataError
from sft_play.model.tokenizer import default_template, load_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
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


def encode(tokenizer: Any, messages: Sequence[Message]) -> Encoded:
    return rows_of(tokenizer, messages)[-1]


def rows_of(tokenizer: Any, messages: Sequence[Message]) -> list[Encoded]:
    return Encoder(Config(model=ModelConfig(name="tiny")), tokenizer).conversation(messages)


def trained(tokenizer: Any, *rows: Encoded) -> list[str]:
    """Returns the text of each unbroken run of trained tokens."""
    runs: list[list[int]] = []
    for encoded in rows:
        runs.append([])
        for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
            if label == IGNORED:
                runs.append([])
            else:
                assert label == token
                runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


Family = tuple[str, Any, str, str]
"""Name, tokenizer, what is written before an answer, and the mark that ends it."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    folder = tmp_path_factory.mktemp("tokenizers")

    def made(name: str, template: str | None, before: str, end: str, **options: Any) -> Family:
        return name, tokenizer_of(folder / name, template, **options), before, end

    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    all_of_them = [
        made("chatml", CHAT_TEMPLATE, "<|im_start|>assistant\n", "<|im_end|>"),
        made(
            "llama3", LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
            added=headers, bos="<|begin_of_text|>", eos="<|end_of_text|>",
        ),
        made(
            "gemma", GEMMA, "<start_of_turn>model\n", "<end_of_turn>",
            added=["<start_of_turn>", "<end_of_turn>"], bos="<bos>", eos="<eos>",
        ),
        made("zephyr", ZEPHYR, "<|assistant|>\n", "</s>", eos="</s>"),
        made("default", None, "<|im_start|>assistant\n", "<|im_end|>"),
    ]  # fmt: skip
    return {family[0]: family for family in all_of_them}


NAMES = ["chatml", "llama3", "gemma", "zephyr", "default"]


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]


def test_a_chatml_mask_written_by_hand(families: dict[str, Family]) -> None:
    _, tokenizer, _, _ = families["chatml"]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start, end = 1, 2
    question = [start, *ids("user\nHow are you?"), end, *ids("\n"), start, *ids("assistant\n")]
    answer = [*ids("Fine, thanks."), end]
    encoded = encode(tokenizer, SINGLE)
    assert encoded.input_ids == [*question, *answer]
    assert encoded.labels == [IGNORED] * len(question) + answer
    assert encoded.prompt_ids == question
    assert encoded.reference == "Fine, thanks."


def test_every_answer_is_trained_with_its_end_and_nothing_else(family: Family) -> None:
    _, tokenizer, _, end = family
    assert trained(tokenizer, *rows_of(tokenizer, CONVERSATION)) == [f"Fine, thanks.{end}", f"The same:\n\n  still fine.{end}"]


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_a_template_with_bos_begins_with_exactly_one(name: str, families: dict[str, Family]) -> None:
    tokenizer = families[name][1]
    encoded = encode(tokenizer, CONVERSATION)
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
    assert encoded.input_ids[0] == encoded.prompt_ids[0] == tokenizer.bos_token_id


def add_bos(folder: Path, template: str | None) -> Any:
    """Returns a tokenizer that puts `<s>` before every text, as Llama's does."""
    from tokenizers import processors

    tokenizer = tokenizer_of(folder, template, bos="<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_the_default_template_writes_bos_where_the_tokenizer_would(tmp_path: Path) -> None:
    tokenizer = add_bos(tmp_path, None)
    tokenizer.chat_template = default_template(tokenizer)
    encoded = encode(tokenizer, SINGLE)
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1


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
    assert trained(tokenizer, encode(tokenizer, SINGLE)) == ["Fine, thanks.</s>"]


def test_a_conversation_that_the_template_refuses_names_its_roles(families: dict[str, Family]) -> None:
    with pytest.raises(DataError, match=r"system, user.*System role not supported"):
        encode(families["gemma"][1], [{"role": "system", "content": "Be brief."}, *SINGLE])


def test_a_template_without_an_end_of_turn_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(DataError, match="no end-of-turn token"):
        encode(tokenizer, SINGLE)


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
        encode(tokenizer_of(tmp_path, template), CONVERSATION)


def test_answers_that_lose_their_thought_later_get_rows_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, QWEN3)
    found = trained(tokenizer, *rows_of(tokenizer, CONVERSATION))
    thought = "<think>\n\n</think>\n\n"  # what inference writes after the generation prompt
    assert found == [f"{thought}Fine, thanks.<|im_end|>", f"{thought}The same:\n\n  still fine.<|im_end|>"]
    first, second = rows_of(tokenizer, CONVERSATION)
    assert tokenizer.decode(first.prompt_ids) == "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    assert "<think>" not in tokenizer.decode(second.prompt_ids)


def test_spaces_within_an_answer_are_trained_where_offsets_are_trimmed(tmp_path: Path) -> None:
    """GPT-NeoX's tokenizer gives a token of white space an empty span."""
    from tokenizers import processors

    tokenizer = tokenizer_of(tmp_path, CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "one\n\n\n\ttwo   \n"
    assert trained(tokenizer, encode(tokenizer, [SINGLE[0], {"role": "assistant", "content": answer}])) == [f"{answer}<|im_end|>"]
