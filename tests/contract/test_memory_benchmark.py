"""The memory benchmark's rows say what was planned and measured, and a difference beyond its bound is a failure."""

from __future__ import annotations

from benchmarks.memory import INTRODUCTION, compare, page
from tests.conftest import ROOT

GIB = 2**30


def test_growth_leaves_the_context_out_and_must_agree() -> None:
    planned = {"frozen": GIB, "activations": GIB, "fragmentation": 0, "context": 9 * GIB, "free": 5 * GIB}
    near, far = planned | {"fragmentation": GIB // 10}, planned | {"fragmentation": GIB}
    assert compare("a", {"trace": planned, "probe": near}, on_gpu=False) == ("| a | 2.00 | 2.10 | -4.8% |", True)
    assert compare("a", {"trace": planned, "probe": far}, on_gpu=False)[1] is False
    slight = {"trace": {"frozen": GIB // 2}, "probe": {"frozen": GIB // 2 + 90 * 2**20}}
    assert compare("a", slight, on_gpu=True)[1] and not compare("a", slight, on_gpu=False)[1], "90 MiB are a workspace or two"
    more = near | {"activations": int(1.1 * GIB)}
    assert compare("a", {"trace": planned, "probe": more}, on_gpu=True) == (
        "| a | 2.00 | 2.20 | -9.1% | 2.00 | 2.10 | -4.8% | 2.00 | 2.20 | -9.1% | 11.00 | 11.20 | -1.8% |",
        False,
    )


def test_the_published_page_is_what_the_command_writes_and_holds() -> None:
    published = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert published.startswith(INTRODUCTION)
    rows = [line for line in published.splitlines() if line.startswith("| ") and "GiB" not in line]
    assert rows and all(abs(float(row.split("|")[4].strip().rstrip("%"))) <= 10 for row in rows)
    assert page(["| a | 1.00 | 1.00 | +0.0% |"]).startswith(INTRODUCTION)
