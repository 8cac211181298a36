"""Create models with random weights (`model.init: random`), and a tokenizer trained on the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, DataSource
from sft_play.data.formats import understand
from sft_play.data.sources import identify, read_source
from sft_play.errors import DataError
from sft_play.files import make_once, read_json, text_sha256
from sft_play.model.convert import LABEL, byte_level
from sft_play.model.resolve import (
    describe,
    resolve_model,
    small_files,
    tokenizer_sha256,
)
from sft_play.model.tokenizer import load_tokenizer
from sft_play.plan.architecture import is_scratch, label, scratch_architecture, trains_tokenizer
from sft_play.runs.folder import cache_folder
from sft_play.runs.prepared import ResolvedModel
from sft_play.text import tell

FORMAT = "1"
"""Increased when the same settings, or the same text, would give another folder."""


def resolve(config: Config) -> ResolvedModel:
    """Return the configured model, created or downloaded if necessary. Raise `DataError` with a hint."""
    return _random(config) if config.model.init == "random" else resolve_model(config.model)


def describe_source(config: Config, model: ResolvedModel) -> str:
    """Describe the model and its origin in a line."""
    if model.source == "embedded":
        return f"model: {LABEL}, from a package: the hub cannot be reached"
    origins = {
        "hub": f"from the hub at commit {(model.revision or '')[:12]}",
        "scratch": f"random weights from train.seed {config.train.seed}",
    }
    return f"model: {model.name}, {origins.get(model.source, f'from the folder {model.path}')}"


def _random(config: Config) -> ResolvedModel:
    """Return the model of a folder with random weights, created on first use."""
    settings = config.model
    own = settings.tokenizer or settings.name
    if is_scratch(settings):
        architecture = scratch_architecture(settings)
    else:
        architecture = dict(read_json(small_files(settings.name, settings.revision) / "config.json"))
    rows = _vocabulary(architecture)
    if trains_tokenizer(settings):
        source = train_tokenizer(config.data.sources, rows, config.train.seed)
    else:
        source = small_files(own, *((None, "tokenizer") if settings.tokenizer else (settings.revision,)))

    def make(folder: Path) -> None:
        tokenizer = load_tokenizer(source)
        if len(tokenizer) > rows:
            key = "`model.vocab_size`" if settings.vocab_size else f"the vocabulary of `{settings.name}`"
            hint = f"MODEL_VOCAB_SIZE={len(tokenizer)} or more" if settings.vocab_size else "take a tokenizer that fits"
            raise DataError(
                f"{key} is {rows}, but the tokenizer has {len(tokenizer)} tokens", place=str(own), hint=hint
            )
        tell(f"making the random weights of {settings.name or f'a model {label(settings)}'}, this once")
        tokenizer.save_pretrained(str(folder))
        _write_weights(folder, architecture, tokenizer, config.train.seed)

    parts = [
        architecture,
        config.train.seed,
        tokenizer_sha256(source),
        *(version(name) for name in ("torch", "transformers")),
    ]
    return describe(label(settings), _made("scratch", parts, make), "scratch", None)


def _vocabulary(architecture: dict[str, Any]) -> int:
    """Return the number of rows of a model's embedding."""
    return int((architecture.get("text_config") or architecture)["vocab_size"])


def _write_weights(folder: Path, architecture: dict[str, Any], tokenizer: Any, seed: int) -> None:
    """Write config and float32 weights as transformers initialises them on a CPU after `torch.manual_seed(seed)`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from sft_play.model.load import settings_of

    logging.disable_progress_bar()
    settings = settings_of(architecture)
    for each in (settings, settings.get_text_config()):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(each, name, getattr(tokenizer, name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(str(folder))


def _made(kind: str, parts: list[Any], make: Callable[[Path], None]) -> Path:
    """Return the cache folder that `make` fills, named after the hash of `parts`, from which it is made."""
    key = text_sha256(json.dumps([FORMAT, *parts], ensure_ascii=False, sort_keys=True))[:24]
    return make_once(cache_folder() / "models" / f"{kind}-{key}", "tokenizer.json", make)


# `model.tokenizer: train`: a byte-level BPE from the training data, trained once and cached by the data's content.
#
# As in SmolLM, digits are split one by one, then text into GPT-2's pieces over bytes, so that any text can be written
# and no token is unknown. Four special tokens come first: `<|endoftext|>` (eos, between documents), `<|pad|>`, and
# ChatML's `<|im_start|>` and `<|im_end|>`. A pair of tokens is merged when it occurs at least twice.


END, PAD, TURN, TURN_END = MARKS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
LEAST_OCCURRENCES = 2
MOST_CHARACTERS = 10**9
"""More text would hardly change a vocabulary, but take hours and much memory, so the rest is not used."""


def train_tokenizer(sources: Sequence[DataSource], vocab_size: int, seed: int = 0) -> Path:
    """Return the folder of the tokenizer for this data, from the cache if it was trained before.

    `seed` chooses the rows of a source that has `rows`, as in preparation. Raise `DataError` for data that cannot be
    read, or that is too little for `vocab_size` tokens.
    """

    def train(folder: Path) -> None:
        tell(f"training a tokenizer of {vocab_size:,} tokens on the training data, this once")
        _train(sources, vocab_size, seed, folder)

    used = [[identify(source)[0], seed if source.rows is not None else None] for source in sources]
    return _made("trained-tokenizer", [vocab_size, version("tokenizers"), used], train)


def texts_of(sources: Sequence[DataSource], seed: int = 0) -> Iterator[str]:
    """Yield the texts and turns of all rows, up to `MOST_CHARACTERS`; preparation reports the bad rows skipped here.

    Raise `DataError` for a file that cannot be read, and for rows of tokens, which contain no text.
    """
    characters_left = MOST_CHARACTERS
    for source in sources:
        form: str | None = None if source.format == "auto" else source.format
        for placed in read_source(source, seed=seed):
            try:
                example = understand(placed, form)
            except DataError:
                continue
            form = example.form
            if example.input_ids is not None:
                raise DataError(
                    "a tokenizer cannot be trained on rows that are already tokens",
                    place=example.place,
                    hint="set `model.tokenizer` to the folder or hub id of the tokenizer that made them",
                )
            turns = [str(message["content"]) for message in example.messages or () if message.get("content")]
            for text in [example.text] if example.text is not None else turns:
                yield text
                characters_left -= len(text)
            if characters_left <= 0:
                return


def _train(sources: Sequence[DataSource], vocab_size: int, seed: int, folder: Path) -> None:
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level(models.BPE())
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
            f"the training data has too little text for `model.vocab_size` {vocab_size}: it gives {reached} tokens",
            place=", ".join(source.path for source in sources),
            hint=f"MODEL_VOCAB_SIZE={reached} at most, or more text; a vocabulary should be far smaller than its text",
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[TURN, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(str(folder))
