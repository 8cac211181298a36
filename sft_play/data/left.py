"""What a reader left out, and why."""

from __future__ import annotations

from collections import Counter


class LeftOut:
    """Counts rows and files that were read and are no part of the data, by reason, with the first place of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        """Counts one."""
        self.counts[reason] += 1
        self.first.setdefault(reason, place)
