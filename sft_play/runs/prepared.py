"""What preparation (once, before any process group) tells the plan and the workers. Written by layer 3, read by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError, first_line
from sft_play.files import read_json, write_json

HUB = "hub:"
"""Before the commit of a data set of the hub, where a checksum stands for files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """How conversations are written, where it is not the tokenizer's own way (`data.templates.chat_format`)."""

    name: str | None = None
    """Of a template of this package; `None` where the template is a file's or the tokenizer's own."""
    template: str | None = None
    """Text of the chosen template, so that a run does not depend on the file it came from; `None` is the tokenizer's own."""
    system: str | None = None
    """System turn for conversations without one."""
    style: Mapping[str, str] = field(default_factory=dict)
    """What `data.style` says, without what is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """Where the base model really is, and what it is."""

    name: str
    """As the configuration says."""
    path: str
    """Folder with `config.json`, weights and tokenizer."""
    source: str
    """`folder`, `hub`, `embedded`, or `scratch` for random weights that were made here."""
    revision: str | None
    """The hub's commit; `None` for a folder."""
    fingerprint: str
    """sha256 over the hub's commit, the contents of config and weight index, and every weight file's checksum (`model.digests`)."""
    tokenizer_fingerprint: str
    """sha256 over the tokenizer's files, the chat template and what `data.system` and `data.style` add to it."""
    chat: ChatFormat | None = None
    """How conversations are written; `None` is the tokenizer's own template."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> ResolvedModel:
        chat = value.get("chat")
        return ResolvedModel(**{**value, "chat": ChatFormat(**chat) if chat else None})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """What one source gave to a split."""

    name: str
    """`data.sources[].name`, else its path."""
    rows: int
    tokens: int
    label_tokens: int
    weight: float | None = None
    """As configured; `None` where the source's rows are all taken once an epoch."""
    content: str | None = None
    """sha256 over the source's files; of a data set of the hub `hub:` and its commit; `None` where neither is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSplit:
    """Facts of one prepared split."""

    path: str
    """Folder for `datasets.load_from_disk`, columns `input_ids`, `labels` (-100 where not trained), `row`, `source` (index into
    `sources`), `prompt_ids` and `reference` (both empty where a row has no answer to generate)."""
    rows: int
    dropped: int
    """Rows left out, each with its reason in the manifest."""
    tokens: int
    label_tokens: int
    """Tokens that a loss is computed for, after the shift by one."""
    longest: int
    """Tokens of the longest row."""
    median: int
    """Tokens of the median row."""
    fingerprint: str
    """sha256 over the content of the prepared rows."""
    most_labels: int = 0
    """Label tokens of the row that has most; 0 where an earlier version prepared it."""
    truncated: int = 0
    """Rows cut to `model.max_seq_len`."""
    sources: tuple[SourceFacts, ...] = ()
    """In the order of `data.sources`."""
    template: str | None = None
    """sha256 of a conversation as the chat template writes it (`data.rendered`)."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> PreparedSplit:
        sources = tuple(SourceFacts(**source) for source in value.get("sources", ()))
        return PreparedSplit(**{**value, "sources": sources})


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The model and the data that a run really uses."""

    model: ResolvedModel
    train: PreparedSplit | None
    validation: PreparedSplit | None

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Prepared:
        """Reads what preparation found. Raises `CheckpointError` for a file that says nothing of that."""
        try:
            return Prepared.from_json(read_json(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not what preparation found: {first_line(error)}", place=str(path)) from error

    @staticmethod
    def from_json(value: dict[str, Any]) -> Prepared:
        def split(part: dict[str, Any] | None) -> PreparedSplit | None:
            return PreparedSplit.from_json(part) if part else None

        return Prepared(
            model=ResolvedModel.from_json(value["model"]),
            train=split(value["train"]),
            validation=split(value["validation"]),
        )
