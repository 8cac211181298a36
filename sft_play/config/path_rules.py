"""Rules of keys that name files: a name that no file system takes is said with its key, before anything is looked for. No effects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.config.types import shown
from sft_play.config.yaml_source import Node
from sft_play.errors import UserError
from sft_play.files import is_file_name


def paths(config: Config, origins: Origins) -> Iterator[UserError]:
    """Names that are too long, and homes of users who are not here."""
    for key, name, text in _named(config):
        given = f"`{name}` is `{shown(Node(text))}`"
        if not is_file_name(text):
            yield problem(
                origins,
                key,
                f"{given}, longer than a file's name or path may be",
                "a part of a path has at most 255 bytes, a path 4,095",
            )
        elif any("**" in part and part != "**" for part in text.split("/")):
            yield problem(origins, key, f"{given}, and `**` is a whole part of a path", "`data/**/*.jsonl`")
        elif text.startswith("~") and not _has_home(text):
            yield problem(origins, key, f"{given}, and there is no such user", "`~/` is your own folder")


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields (key, name in messages, value) of everything that may be a path."""
    data = config.data
    single = {
        "model.name": config.model.name, "model.tokenizer": config.model.tokenizer, "data.chat_template": data.chat_template,
        "data.train_path": data.train_path, "data.val_path": data.val_path,
    }  # fmt: skip
    yield from ((key, key, text) for key, text in single.items() if text)
    for key, short, sources in (
        ("data.sources", data.train_path, data.sources),
        ("data.validation", data.val_path, data.validation if isinstance(data.validation, list) else []),
    ):
        if not short:  # else it is the same path, and was looked at
            yield from ((key, f"{key}[{index}].path", source.path) for index, source in enumerate(sources))


def _has_home(text: str) -> bool:
    try:
        Path(text).expanduser()
    except RuntimeError:
        return False
    return True


RULES = (paths,)
