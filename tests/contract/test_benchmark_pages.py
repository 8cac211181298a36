"""The pages of benchmarks begin as their commands write them, and say what was not measured."""

from __future__ import annotations

import pytest

from benchmarks import evaluation, memory, preparation, training
from tests.documents import ROOT

PAGES = {
    "benchmarks": training.page(""),
    "benchmarks-evaluation": evaluation.page(""),
    "benchmarks-preparation": preparation.page(""),
    "memory": memory.INTRODUCTION,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_command_writes(name: str) -> None:
    published = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert published.startswith(PAGES[name].rstrip())
    assert "NOT ALL" not in published
