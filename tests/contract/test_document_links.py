"""Every relative link of the documents leads to a file of the repository, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import ROOT, documents

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Returns what a page's headings are called in links, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(path: Path) -> list[str]:
    found = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: `{link}` leads to nothing"
        assert not anchor or anchor in anchors(target), f"{page.name}: `{link}`: no such heading"
