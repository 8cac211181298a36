"""The arguments of every benchmark: `NAME=value`, each with a default."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def options_of(arguments: Sequence[str], **defaults: int) -> tuple[dict[str, int], str | None] | None:
    """Returns the numbers that were given or else their defaults, and the file to `write`; `None`, after saying so, for others."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    document = given.pop("write", None)
    unknown = [name for name, value in given.items() if name not in defaults or not value.isdigit()]
    if unknown:
        print(f"unknown arguments: {', '.join(unknown)}; there are {', '.join(defaults)} (numbers) and write", file=sys.stderr)
        return None
    return defaults | {name: int(value) for name, value in given.items()}, document
