"""What a check says about a machine of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fail", "warning"]
MOST_LISTED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that keeps a host from taking part (`fail`), or makes it worse (`warning`)."""

    id: str
    """Stable name, listed in docs/home-cluster.md."""
    severity: Severity
    text: str
    remedy: str


def verdict(findings: Sequence[Finding]) -> str:
    """Returns `ok`, `warning` or `fail`."""
    severities = {one.severity for one in findings}
    return "fail" if "fail" in severities else "warning" if severities else "ok"


def listed(words: Sequence[str], marks: str = "`") -> str:
    """Returns the first words, and how many more there are."""
    shown = ", ".join(f"{marks}{word}{marks}" for word in words[:MOST_LISTED])
    return shown + (f" and {len(words) - MOST_LISTED} more" if len(words) > MOST_LISTED else "")
