"""`make inspect` as a user sees it: the mask in the terminal, reasons, one page, and rows as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.inspection import MOST_BINS, histogram
from tests.browser import browser
from tests.conftest import Program

pytestmark = pytest.mark.slow

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}, <b>sure</b>."},
        ]
    }
    for n in range(12)
]
LONG = {"question": "What?", "answer": "word " * 400}


@pytest.fixture
def arguments(tiny: Path, tmp_path: Path) -> list[str]:
    chat, pairs = tmp_path / "chat.jsonl", tmp_path / "pairs.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    pairs.write_text(
        "".join(json.dumps(row) + "\n" for row in [{"question": "[/b] \x1b[2JWho?", "answer": "Nobody."}, LONG])
    )
    config = tmp_path / "small.yaml"
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 96}}\n"
        f"data:\n  sources:\n    - {{path: {chat}, name: chat}}\n    - {{path: {pairs}, name: '[/pairs] :smile:'}}\n"
        "  validation: 0.2\n  overlong: drop\n"
    )
    return ["inspect", f"CONFIG={config}"]


def test_the_terminal_shows_learnt_tokens_and_skipped_rows(program: Program, arguments: list[str]) -> None:
    done = program(*arguments, "ROWS=20")
    assert done.code == 0, done.err
    for shown in re.findall(r"^«.*$", done.out.partition("──")[2], re.MULTILINE):
        assert re.fullmatch(r"«(It is \d+, <b>sure</b>\.|Nobody\.)<\|im_end\|>»", shown), shown
    assert done.out.count("<|im_start|>user") == done.out.count("train row ") > 5
    assert "skipped in chat: 1 (duplicate)" in done.out
    assert re.search(
        r"skipped in \[/pairs\] :smile:: 1 \(longer than model\.max_seq_len\): \S+pairs\.jsonl:2", done.out
    )
    assert "[/b] \\x1b[2JWho?" in done.out and "\x1b" not in done.out, "names and rows are shown verbatim"


def test_each_row_is_named_by_its_place(in_process: Program, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    lines = [json.dumps({"question": f"Who is {n // 2}?", "answer": "Nobody."}) for n in range(6)]
    (tmp_path / "rows" / "a.jsonl").write_text("\n".join([lines[0], "{", "", *lines[1:]]))
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 96}}\ndata: {{sources: [{{path: {tmp_path}/rows, name: x}}],"
        " bad_rows: drop}\n"
    )
    words = ("inspect", f"CONFIG={config}", "ROWS=9")
    places = [sample["place"] for sample in in_process(*words, "JSON=1").json["samples"]]
    expected = [f"{tmp_path}/rows/a.jsonl:{line}" for line in (1, 5, 7)]
    assert places == expected, "bad rows, blank lines and copies are left out"
    assert f"train row {places[2]}: " in in_process(*words).out


def test_samples_are_searched_by_their_text(in_process: Program, arguments: list[str]) -> None:
    done = in_process(*arguments, "SEARCH=NOBODY", "JSON=1")
    [sample] = done.json["samples"]
    pieces = sample["pieces"]
    assert sample["source"] == "[/pairs] :smile:"
    assert "".join(piece["text"] for piece in pieces if piece["trained"]) == "Nobody.<|im_end|>"
    assert sum(piece["tokens"] for piece in pieces) == sample["tokens"]
    assert sum(piece["tokens"] for piece in pieces if piece["trained"]) == sample["trained"]
    assert "no row contains `zebra`" in in_process(*arguments, "SEARCH=zebra").err


def test_the_page_shows_statistics_and_searches(in_process: Program, arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = in_process(*arguments, "HTML=1", f"OUT={path}")
    assert done.code == 0, done.err
    assert str(path) in done.out
    manifest = in_process(*arguments, "JSON=1").json["manifest"]["split"]
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", path.read_text(encoding="utf-8")), (
        "nothing comes from a server"
    )
    with browser(tmp_path / "profile") as shown:
        for width in (390, 1440):
            shown.open("about:blank")
            shown.open(path.as_uri(), width=width)
            shown.wait("document.querySelectorAll('.chart canvas').length == 2")
            assert shown.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
        words = shown.value("document.body.innerText")
        assert f"{100 * manifest['label_tokens'] / manifest['tokens']:.1f} % of all" in words
        assert "skipped in chat: 1 (duplicate)" in words and "<b>sure</b>" in words and "[/pairs] :smile:" in words
        assert shown.value("document.querySelectorAll('.row').length") == manifest["rows"]
        assert not shown.value("document.querySelectorAll('.row b').length"), "text of rows is never markup"
        trained = shown.value("[...document.querySelectorAll('.row .trained')].map((one) => one.textContent).join('')")
        assert trained.count("It is ") + trained.count("Nobody.") == manifest["rows"] and "What is" not in trained
        typed = "box.value = '{}'; box.dispatchEvent(new Event('input'))"
        shown.value("box = document.querySelector('input[type=search]');" + typed.format("NOBODY.<|im"))
        assert shown.value("document.querySelectorAll('.row').length") == 1, (
            "in any letter case, over the border of two pieces"
        )
        assert (
            shown.value("[...document.querySelectorAll('mark')].map((one) => one.textContent).join('')")
            == "Nobody.<|im"
        )
        shown.value(
            "[...document.querySelectorAll('button')].find((one) => one.textContent.startsWith('validation')).click()"
        )
        shown.value("box = document.querySelector('input[type=search]');" + typed.format(""))
        assert shown.value("document.querySelectorAll('.row').length") == 12 + 1 - manifest["rows"], "the other split"
        assert "scored" in shown.value("document.body.innerText")
        assert re.search(r"row \S*chat\.jsonl:\d+: ", shown.value("document.body.innerText"))
        assert not shown.complaints


def test_the_page_shows_whole_rows_weights_and_counts_that_add_up(
    in_process: Program, tiny: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "List."}, {"role": "assistant", "content": "\n".join("abcdefghijklmnopqrst")}]
    rows = [{"messages": turns * times, "weight": 0.3} for times in (1, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    config, page = tmp_path / "c.yaml", tmp_path / "page.html"
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 96}}\ndata: {{train_path: {tmp_path / 'rows.jsonl'}, overlong: split}}\n"
    )
    assert in_process("inspect", f"CONFIG={config}", "HTML=1", f"OUT={page}").code == 0
    with browser(tmp_path / "profile") as shown:
        shown.open(page.as_uri(), width=390)
        shown.wait("document.querySelectorAll('.row').length")
        hidden = (
            "[...document.querySelectorAll('.row')].filter((one) => one.scrollHeight > one.clientHeight + 1).length"
        )
        assert shown.value(hidden) == 0, "a row is cut, and its answer cannot be seen"
        words = shown.value("document.body.innerText")
        assert "[0.3] weight of what follows" in words and "[0.3] a" in words
        cells = shown.value("[...document.querySelectorAll('.rows tbody tr')[0].cells].map((one) => one.textContent)")
        read, skipped, whole, _, parts = map(int, cells[1:6])
        assert read == skipped + whole == 3 and parts == shown.value("document.querySelectorAll('.row').length") > whole


@pytest.mark.parametrize("values", [[1], [98, 97, 3, 3], [8192, 1], [0, 0]])
def test_bins_of_a_histogram_hold_every_row(values: list[int]) -> None:
    bins = histogram(values)
    assert sum(bins["counts"]) == len(values) and len(bins["counts"]) <= MOST_BINS
    assert all(bins["counts"][value // bins["width"]] for value in values)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("SPLIT=val", "expected `train` or `validation`\n\nhint: did you mean `validation`?"),
        ("SPLIT=test", "`SPLIT` is `test`; expected `train` or `validation`"),
        ("HTML=maybe", "`HTML` is `maybe`"),
        ("OUT=x.html", "no page is written"),
        ("ROWS=0", "`ROWS`"),
    ],
)
def test_data_that_cannot_be_shown_are_refused(
    in_process: Program, arguments: list[str], typed: str, words: str
) -> None:
    in_process(*arguments, typed).refused(2, words)


def test_truncated_rows_are_reported(in_process: Program, arguments: list[str]) -> None:
    done = in_process(*arguments, "DATA_OVERLONG=truncate_answers")
    assert "kept of [/pairs] :smile:: 1 cut to model.max_seq_len (1 lost the end of an answer)" in done.out, done.err
    assert "no row was skipped" not in done.out


def test_weights_are_shown_and_are_part_of_the_data(in_process: Program, tiny: Path, tmp_path: Path) -> None:
    def inspect(name: str, weights: list[float | None], *words: str) -> Any:
        turns: list[dict[str, Any]] = []
        for answer, weight in zip(("One.", "Two."), weights, strict=False):
            turns.append({"role": "user", "content": "Who?"})
            turns.append({"role": "assistant", "content": answer} | ({} if weight is None else {"weight": weight}))
        row = {"messages": turns} | ({"weight": weights[2]} if len(weights) > 2 else {})
        path, config = tmp_path / name / "rows.jsonl", tmp_path / f"{name}.yaml"
        path.parent.mkdir()
        path.write_text(json.dumps(row) + "\n")
        config.write_text(f"model: {{name: {tiny}, max_seq_len: 96}}\ndata: {{train_path: {path}}}\n")
        return in_process("inspect", f"CONFIG={config}", *words)

    shown = inspect("terminal", [0.3, None])
    assert "«[0.3] One.<|im_end|>»" in shown.out and "«Two.<|im_end|>»" in shown.out
    assert "[0.3] weight of what follows" in shown.out and "rows with weights other than 1: 1" in shown.err
    record = inspect("weighted", [0.3, None, 0.5], "JSON=1").json
    pieces = [piece for piece in record["samples"][0]["pieces"] if piece["trained"] and not piece["special"]]
    assert [(piece["text"], piece["weight"]) for piece in pieces] == [("One.", 0.15), ("Two.", 0.5)]
    assert record["manifest"]["weighted_rows"] == 1
    of = {
        name: inspect(name, weights, "JSON=1").json["manifest"]["split"]["fingerprint"]
        for name, weights in {
            "none": [None, None],
            "one": [1, 1, 1],
            "masked": [0, None],
            "some": [0.3, None],
            "other": [0.4, None],
        }.items()
    }
    assert of["none"] == of["one"] and len({*of.values()}) == 4, "a run that continues compares them"
    bad = inspect("bad", [1.5])
    assert bad.code and "rows.jsonl:1: `messages[1].weight` is `1.5`; expected a number from 0 to 1" in bad.err
    assert "weight of what follows" not in inspect("plain", [None]).out
