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
    """Returns every Markdown file that users read."""
    folders = [ROOT / "docs", ROOT / "examples", ROOT / "accelerate_configs", ROOT / "deepspeed", ROOT / "benchmarks"]
    return [ROOT / "README.md", *sorted(p for folder in folders for p in folder.rglob("*.md"))]


def documented_commands() -> list[DocumentedCommand]:
    """Returns the lines of all shell blocks, continuation lines joined, comments and blank lines left out."""
    found = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            first = text.count("\n", 0, block.start(1)) + 1
            joined = re.sub(r"\\\n\s*", lambda m: " " * len(m.group()), block.group(1))
            for offset, line in enumerate(joined.split("\n")):
                if line.strip() and not line.lstrip().startswith("#"):
                    found.append(DocumentedCommand(str(path.relative_to(ROOT)), first + offset, line.strip()))
    return found
