"""What a check says about a machine of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sft_play.config.cluster import Host
from sft_play.runs.origin import OPTIONAL

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


def optional_hints(host: Host, theirs: Mapping[str, str], own: Mapping[str, str], where: str) -> list[str]:
    """Returns how a host gets the same packages as `where` has (`own`), of those that no installation of ours brings."""
    hints = []
    for name in OPTIONAL:
        version, other = own.get(name), theirs.get(name)
        if version != other:
            words = f"install {name}=={version}, or uninstall" if version else f"uninstall {name}, or install"
            hints.append(f"on `{host.name}`, in `{host.folder}`: {host.python} -m pip {words} it {where}")
    return hints
