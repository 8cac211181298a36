"""For which GPUs a build of torch has code. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

LACKING_REMEDY = "install a torch build for this GPU: a newer one for new cards, an older one for cards that were dropped"


def number(version: str) -> tuple[int, ...]:
    """Returns a version as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def supports(architectures: Sequence[str], capability: str) -> bool:
    """Whether code for `sm_XY` runs on the card: same major version, minor not newer; or PTX of anything not newer."""
    card = number(capability)
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = re.sub(r"\D.*", "", digits)
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == card[0] and built[1] <= card[1]:
            return True
        if kind == "compute" and built <= card:
            return True
    return False


def lacking(torch: str, architectures: Sequence[str], names: str, capability: str) -> str:
    """Returns the words for cards that a torch has no code for."""
    return f"torch {torch} has no code for {names} (compute capability {capability}); it has {', '.join(architectures)}"
