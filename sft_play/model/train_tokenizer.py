"""`model.tokenizer: train`: a byte-level BPE from the training data, made once and kept by the content that it came from.

As SmolLM's: digits one by one, then GPT-2's pieces over bytes, so that any text can be written and no token is unknown. Four marks
come first: `<|endoftext|>` (eos, between documents), `<|pad|>`, and ChatML's `<|im_start|>` and `<|im_end|>`. A pair of tokens is
merged when it occurs at least twice.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from sft_play.config.schema import DataSource
from sft_play.data.formats import recognise, to_example
from sft_play.data.read import BUILTIN, files_of, read_source
from sft_play.errors import DataError
from sft_play.files import file_sha256, sync_folder, text_sha256
from sft_play.runs.folder import cache_folder
from sft_play.runs.space import made_aside

VERSION = "1"
"""Raised when the same text would give another tokenizer."""
END, PAD, TURN, TURN_END = MARKS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
LEAST_OCCURRENCES = 2
MOST_CHARACTERS = 10**9
"""More text does not change a vocabulary much, and would take hours and much memory: what comes later is left out."""
READY = "tokenizer.json"


def trained_tokenizer(sources: Sequence[DataSource], vocab_size: int, seed: int = 0) -> Path:
    """Returns the folder of the tokenizer for this data, from the cache where it was made before.

    `seed` chooses the rows of a source that has `rows`, as it does when the data are prepared. Raises `DataError` for data that
    cannot be read, or that are too little for `vocab_size` tokens.
    """
    folder = cache_folder() / "tokenizers" / _content_key(sources, vocab_size, seed)
    if not (folder / READY).is_file():
        print(f"training a tokenizer of {vocab_size:,} tokens on the training data, this once", file=sys.stderr, flush=True)
        with made_aside(folder.parent, "tokenizer") as scratch:
            made = scratch / "tokenizer"
            _train(sources, vocab_size, seed, made)
            try:
                made.rename(folder)
            except OSError:  # another process was first; its folder is the same
                if not (folder / READY).is_file():
                    raise
            sync_folder(folder.parent)
    return folder


def _content_key(sources: Sequence[DataSource], vocab_size: int, seed: int) -> str:
    parts: list[object] = [VERSION, vocab_size, version("tokenizers")]
    for source in sources:
        parts.append([asdict(replace(source, name=None, weight=None)), seed if source.rows is not None else None])
        if files := files_of(source):
            parts.append([[path.name, file_sha256(path)] for path in files])
        elif source.path.startswith(BUILTIN):
            # The rows are the interpreter's own library, and transformers' own code.
            parts.append([platform.python_version(), version("transformers")])
    return text_sha256(json.dumps(parts, ensure_ascii=False, sort_keys=True))[:24]


def texts_of(sources: Sequence[DataSource], seed: int = 0) -> Iterator[str]:
    """Yields the texts and turns of all rows, up to `MOST_CHARACTERS`; a faulty row is left to preparation, which reports it.

    Raises `DataError` for a file that cannot be read, and for rows of tokens, which hold no text.
    """
    left = MOST_CHARACTERS
    for source in sources:
        form: str | None = None if source.format == "auto" else source.format
        for place, row in read_source(source, seed=seed):
            if isinstance(row, DataError):
                continue
            try:
                form = form or recognise(row)
                example = to_example(row, form, place=place, source=0)
            except DataError:
                continue
            if example.input_ids is not None:
                raise DataError(
                    "a tokenizer cannot be trained on rows that are tokens already", place=place,
                    hint="set `model.tokenizer` to the folder or hub id of the tokenizer that made them",
                )  # fmt: skip
            turns = [str(message["content"]) for message in example.messages or () if message.get("content")]
            for text in [example.text] if example.text is not None else turns:
                yield text
                left -= len(text)
            if left <= 0:
                return


def _train(sources: Sequence[DataSource], vocab_size: int, seed: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_OCCURRENCES,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(sources, seed), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise DataError(
            f"the training data are too little text for `model.vocab_size` {vocab_size}: they give {reached} tokens",
            place=", ".join(source.path for source in sources),
            hint=f"MODEL_VOCAB_SIZE={reached} at most, or more text; a vocabulary should be far smaller than its text",
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, extra_special_tokens=[TURN, TURN_END],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.save_pretrained(str(folder))
