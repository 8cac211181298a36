"""Rules that keep tokens out of files and strangers' code from running. As those of `config.rules`: no effects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.errors import HUB_LOGIN, TOKEN, UserError
from sft_play.files import is_file_name, typed_path

COMMIT = re.compile(r"[0-9a-f]{40}")
FROM_VARIABLE = "environment "
"""How the origin of a key begins that a variable of the environment gave (`config.load`)."""
FROM_ENVIRONMENT = (
    f"set the token as an environment variable (`HF_TOKEN` for the hub) or by {HUB_LOGIN}: what stands in a configuration is kept in "
    "the run folder; and take a new token, since this one has been written down"
)


def tokens(config: Config, origins: Origins) -> Iterator[UserError]:
    """No value may be, or hold, a token."""
    for key, text in _texts(config, ""):
        if TOKEN.search(text):
            yield problem(origins, key, f"`{key}` holds what looks like an access token", FROM_ENVIRONMENT)


def code(config: Config, origins: Origins) -> Iterator[UserError]:
    """A stranger's code runs only where somebody said so for this run, and at a commit that was named.

    A variable of the environment is none: it may stand in a shell's profile, an image or a job's template, and would hold for every
    model. The code in a folder of this machine is the user's own, and a folder has no commit.
    """
    model = config.model
    if not model.trust_remote_code:
        return
    if origins.get("model.trust_remote_code", "").startswith(FROM_VARIABLE):
        yield problem(
            origins, "model.trust_remote_code",
            "`model.trust_remote_code` lets a model's code run, and the environment would say so for every model",
            "take the variable away, and write `trust_remote_code: true` under `model:`, or type MODEL_TRUST_REMOTE_CODE=true with the command",
        )  # fmt: skip
    own = is_file_name(model.name) and typed_path(model.name).is_dir()
    if own or COMMIT.fullmatch(model.revision or ""):
        return
    given = f"`model.revision` is `{model.revision}`" if model.revision else "`model.revision` is not given"
    yield problem(
        origins, "model.trust_remote_code",
        f"`model.trust_remote_code` runs code that comes with the model, so it must be pinned to one commit, and {given}",
        "set `model.revision` to the full commit (40 hexadecimal digits) whose code you have read",
    )  # fmt: skip


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields every text of a configuration with the dotted key that it belongs to."""
    if isinstance(value, str):
        yield key, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            yield from _texts(inner, _inside(key, item.name))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(str(name), key)
            yield from _texts(part, _inside(key, str(name)) if key == "train.extra" else key)
    elif isinstance(value, (list, tuple)):
        for part in value:
            # Of a source the key is `data.sources`, whatever field of it the text is in.
            yield from ((key, text) for _, text in _texts(part, key))


def _inside(key: str, name: str) -> str:
    return name if not key else f"train.{name}" if key == "train.extra" else f"{key}.{name}"


RULES = (tokens, code)
