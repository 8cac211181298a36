"""What every rule between keys shares: its signature, and the problem that it yields at the place of a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sft_play.config.schema import Config
from sft_play.errors import UserError, without_tokens

Origins = Mapping[str, str]
"""Dotted key -> where its value was written; `default` where nobody did."""
Rule = Callable[[Config, Origins], Iterator[UserError]]


def problem(origins: Origins, key: str, text: str, hint: str | None = None) -> UserError:
    """Returns the problem, placed where `key` was written."""
    place = origins.get(key, "default")
    return UserError(text, place=None if place == "default" else without_tokens(place), hint=hint)
