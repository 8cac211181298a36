"""The speeds in docs/forecast.md are what its own commands print."""

from __future__ import annotations

import pytest

from tests.conftest import Program
from tests.documents import ROOT, documented_commands

PAGE = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
HEADING = PAGE.index("## Speeds that people quote")
QUOTED = PAGE[HEADING:]
COMMANDS = [
    command.words[2:]
    for command in documented_commands()
    if command.document == "docs/forecast.md" and command.line > PAGE.count("\n", 0, HEADING)
]


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 5 and all(any(word.startswith("HARDWARE=") for word in words) for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
def test_figures_are_the_plans(program: Program, words: list[str]) -> None:
    done = program("plan", *words, "JSON=1")
    assert done.code == 0, done.err
    found = done.json
    for speed in [row["tokens_per_second"] for row in found.get("scale", [])] or [found["tokens_per_second"]]:
        assert f"{speed:,.0f}" in QUOTED, words
