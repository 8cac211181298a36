"""Finds the commands in the project's documents, so that tests can run what readers will type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """One command line of a fenced block."""

    document: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def documents() -> list[Path]:
    """Return every Markdown file that users read."""
    folders = [ROOT / "docs", ROOT / "examples", ROOT / "accelerate_configs", ROOT / "deepspeed", ROOT / "benchmarks"]
    return [ROOT / "README.md", *sorted(p for folder in folders for p in folder.rglob("*.md"))]


def documented_commands() -> list[DocumentedCommand]:
    """Return the lines of all shell blocks, continuation lines joined, comments and blank lines left out."""
    commands = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            first = text.count("\n", 0, block.start(1)) + 1
            joined = re.sub(r"\\\n\s*", lambda m: " " * len(m.group()), block.group(1))
            for offset, line in enumerate(joined.split("\n")):
                if line.strip() and not line.lstrip().startswith("#"):
                    commands.append(DocumentedCommand(str(path.relative_to(ROOT)), first + offset, line.strip()))
    return commands


TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"


def sections_of_troubleshooting() -> dict[str, str | None]:
    """Return anchor -> the message that docs/troubleshooting.md quotes under it, if it quotes one."""
    sections: dict[str, str | None] = {}
    for part in TROUBLESHOOTING.read_text(encoding="utf-8").split("\n## ")[1:]:
        quoted = re.search(r"^```text\n(.*?)\n```", part, re.M | re.S)
        anchor = re.sub(r"[^a-z0-9 -]", "", part.partition("\n")[0].lower()).replace(" ", "-")
        sections[anchor] = quoted[1] if quoted else None
    return sections


def on_page(anchor: str, shown: str) -> bool:
    """Return whether `shown` has the message that docs/troubleshooting.md quotes under `anchor`; `...` matches
    anything.
    """
    quoted = sections_of_troubleshooting()[anchor]
    assert quoted, anchor
    return re.search(".*?".join(map(re.escape, quoted.split("..."))), shown, re.S) is not None
