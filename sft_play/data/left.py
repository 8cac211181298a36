"""What a reader left out, and why; and what it read, where a path does not say that."""

from __future__ import annotations

from collections import Counter

SCANNED = "pictures without text: it must be read by OCR first"
EMPTY = "no text"
"""Why a document gives nothing to learn."""
BAD = "bad row"
"""With `data.bad_rows: drop`, whatever is wrong with it."""
SHOWN_PLACES = 20
"""Of what was left out for one reason."""


class LeftOut:
    """Counts rows and files that were read and are no part of the data, by reason, with the first places of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.there: int | None = None
        """How many rows there were, where `rows` asks for more."""
        self.commit: str | None = None
        """Of a hub dataset, the commit that was read."""

    def add(self, reason: str, place: str) -> None:
        """Counts one."""
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < SHOWN_PLACES:
            places.append(place)
