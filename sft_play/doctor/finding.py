"""What a check is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that a user should know or mend."""

    id: str
    """Stable name, listed in `docs/doctor.md`."""
    severity: Severity
    """`error`: a run cannot work; `warning`: some runs will fail or be slow; `note`: worth knowing."""
    text: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the user asked about."""

    model_name: str | None
    """The configuration's model, when `CONFIG` was given."""


Check = Callable[[Context], Iterable[Finding]]
