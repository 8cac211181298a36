"""`launch.elastic`: how many machines a cluster run may have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.errors import UserError

ELASTIC = re.compile(r"(\d{1,3}):(\d{1,3})")


def elastic_bounds(text: str | None) -> tuple[int, int] | None:
    """Returns the least and the most machines of `2:4`; `None` where nothing is given, or no such thing."""
    found = ELASTIC.fullmatch(text.strip()) if text else None
    least, most = (int(found[1]), int(found[2])) if found else (0, 0)
    return (least, most) if 1 <= least <= most else None


def _elastic(config: Config, origins: Origins) -> Iterator[UserError]:
    text = config.launch.elastic
    if text is not None and elastic_bounds(text) is None:
        yield problem(
            origins, "launch.elastic", f"`launch.elastic` is `{text}`; expected the least and the most machines, such as `2:4`",
            "the first number is at least 1 and not above the second",
        )  # fmt: skip


RULES = (_elastic,)
