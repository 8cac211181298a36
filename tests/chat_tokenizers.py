"""Small tokenizers that split text as model families do, with their special tokens, built in a second."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sft_play.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from sft_play.data import IGNORED, Message
from sft_play.data.chat import Encoded
from sft_play.data.formats import Example
from sft_play.data.tokens import EncodedExample, Encoder
from sft_play.model.tokenizer import chat_format, load_tokenizer
from sft_play.runs.prepared import ChatFormat

Kind = Literal["gpt2", "llama3", "gemma", "llama2"]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Llama 3's tokenizer.json; Qwen's differs in the numbers only."""


@functools.cache
def _raw(kind: Kind) -> str:
    from pydoc_data.topics import topics

    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    texts = list(topics.values())[:30]
    if kind in ("gpt2", "llama3"):
        raw = Tokenizer(models.BPE())
        parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")]
        if kind == "llama3":
            parts.insert(0, pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"))
        raw.pre_tokenizer = pre_tokenizers.Sequence(parts)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=800,
            special_tokens=["<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(texts, trainer)
        return raw.to_str()
    # As converted from SentencePiece: spaces are marks, Llama 2 and Mistral put one before every text, bytes stand for
    # the unknown.
    spaces: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if kind == "llama2":
        spaces.insert(0, normalizers.Prepend("\u2581"))
    raw = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    raw.train_from_iterator([text.replace("\n", " ") for text in texts], trainer)
    raw.normalizer = normalizers.Sequence(spaces)
    raw.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if kind == "llama2" else steps)
    return raw.to_str()


def save_tokenizer(
    folder: Path,
    kind: Kind,
    *,
    special: Sequence[str] = (),
    bos: str | None = None,
    eos: str | None = None,
    adds_bos: bool = False,
    rstrip: bool = False,
    template: str | None = None,
) -> Path:
    """Write a tokenizer's folder; with `rstrip` special tokens swallow the white space after them, as in Phi-3."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(_raw(kind))
    named = [token for token in (bos, eos) if token]
    raw.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=rstrip) for token in dict.fromkeys([*special, *named])]
    )
    if adds_bos and bos:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def by_hand(tokenizer: Any, row: str) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a row whose learnt parts are between marks.

    A part is tokenised after all that precedes it, but alone if its first letters would change the token before: a
    model that continues cannot do that.
    """
    text, before, ids, labels = "", list[int](), list[int](), list[int]()
    for number, part in enumerate(row.replace("\u203a", "\u2039").split("\u2039")):
        text += part
        tokens = before + list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokens[: len(ids)] != ids:
            assert number % 2, "the hand-made row must not depend on what follows"
            before, text = ids, part
            tokens = before + list(tokenizer(text, add_special_tokens=False)["input_ids"])
        labels += tokens[len(ids) :] if number % 2 else [-100] * (len(tokens) - len(ids))
        ids = tokens
    return ids, labels


def load_with(folder: Path, template: str | None = None, *, text: str | None = None, **data: Any) -> Any:
    """Return a folder's tokenizer with the chat template `template` and other keys of `data`, or with the template
    `text`.
    """
    return load_tokenizer(
        folder, chat_format(DataConfig(chat_template=template, **data)) if text is None else ChatFormat(template=text)
    )


def outcome_of(
    tokenizer: Any, *, limit: int = 4096, overlong: Any = "error", loss_on: Any = "assistant", **example: Any
) -> EncodedExample:
    """Return the encoding of an example with `messages` or `input_ids`."""
    config = Config(
        model=ModelConfig(name="tiny", max_seq_len=limit),
        data=DataConfig(overlong=overlong),
        train=TrainConfig(loss_on=loss_on),
    )
    (outcome,) = Encoder(config, tokenizer).encode([Example(place="rows.jsonl:3", form="messages", **example)])
    return outcome


def rows_of(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, loss_on: Any = "assistant"
) -> Sequence[Encoded]:
    """Return a conversation's training rows, or raise `DataError`."""
    outcome = outcome_of(tokenizer, messages=messages, tools=tools, loss_on=loss_on)
    if outcome.error:
        raise outcome.error
    return outcome.rows


def learnt_runs(tokenizer: Any, rows: Sequence[Encoded]) -> list[str]:
    """Return the text of each unbroken run of learnt tokens."""
    runs: list[list[int]] = []
    for row in rows:
        runs.append([])
        for token, label in zip(row.input_ids, row.labels, strict=True):
            if label == IGNORED:
                runs.append([])
            else:
                assert label == token
                runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]
