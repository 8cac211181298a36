"""The conditions of `filter`: their results for rows, and refusals before any row is read."""

from __future__ import annotations

import datetime

import pytest

from sft_play.config.data_rules import Condition
from sft_play.errors import DataError

ROW = {
    "lang": "en",
    "score": 4,
    "text": "a long text",
    "tags": ["x", "y"],
    "none": None,
    "ok": True,
    "n": "12.5",
    "my name": 1,
    "meta": {"by": {"age": 3}, "x": None},
    "flag": "No",
    "made": datetime.datetime(2024, 3, 1),
    "day": "01.03.2024",
    "empty": "",
}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('lang == "en" and score >= 3', True),
        ("1 <= score < 4", False),
        ('lang in ["de", "en"]', True),
        ('"long" in text', True),
        ("none is None and score is not None", True),
        ("len(text) == 11 and len(tags) == 2", True),
        ("blank(none) and not blank(text) and not blank(score)", True),
        ('has(lang) and not has(none) and not has(elsewhere) and not has("my name x")', True),
        ("number(n) > 12", True),
        ("meta.by.age == 3 and has(meta.by) and not has(meta.x) and not has(meta.y) and not has(lang.x)", True),
        ('column("my name") == 1 and has(column("my name")) and not has(column("no name"))', True),
        ('n >= "12 cm" and lang >= "de"', True),
        ("has(elsewhere) and elsewhere > 3", False),
        ('lang != 1 and n != "13" and n in ["12.5"]', True),
        ('score != "n/a" and lang in {"en"} and text and not empty and not none', True),
        ('made > "2024-02-28" and made != "2024-03-02" and made == "2024-03-01"', True),
        ('n >= "12" and not blank(column("text"))', True),
    ],
)
def test_a_condition_holds_or_not(expression: str, expected: bool) -> None:
    assert Condition(expression)(ROW) is expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("lang ==", "invalid syntax"),
        ("__import__('os').system('x')", "is not a function of one value; there are len, blank"),
        ("text.strip() == ''", "is not a function"),
        ("lang().upper == 1", "`lang().upper` is not part of the language"),
        ("score ** 9 ** 9 > 1", "is not part of the language"),
        ("len(text, 2) > 1", "is not a function of one value"),
        ("has(score + 1)", "is not a function"),
        ("[c for c in text] == []", "is not part of the language"),
        ('lang in "de"', "looks for a piece of a text; a list is written"),
        ('column("lang") in "de"', "looks for a piece of a text; a list is written"),
        ('lang == "de" or "en"', "joins a value and no condition"),
        ('lang == ("de" or "en")', "joins a value and no condition"),
        ("1 < 2", "it names no column"),
        ("(" * 900 + "ok" + ")" * 900, "`filter` "),
    ],
)
def test_expressions_outside_the_language_are_refused_before_they_run(expression: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Condition(expression)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_misspelt_column_is_answered_with_the_one_that_is_there() -> None:
    for expression, meant in (
        ("scroe > 3", "score"),
        ("meta.byy == 1", "meta.by"),
        ("my_name == 1", 'column("my name")'),
    ):
        with pytest.raises(DataError) as caught:
            Condition(expression)(ROW)
        assert caught.value.hint == f"did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        ('lang === "en"', "write `==` for `===`;"),
        ('lang <> "a = b"', "write `!=` for `<>`;"),
        ('lang == "en" && score > 2', "write `and` for `&&`;"),
        ('lang == "en" OR score > 2', "write `or` for `OR`;"),
        ("!blank(lang)", "write `not` for `!`;"),
        ("lang == “en”", 'write `"` for `“`;'),
        ('lang != "a = b" "', "conditions look like"),
    ],
)
def test_an_operator_of_another_language_is_answered_with_ours(expression: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        Condition(expression)
    assert caught.value.hint and caught.value.hint.startswith(hint)
    assert "<unknown>" not in caught.value.message


def test_a_condition_on_an_empty_cell_is_answered_with_how_to_leave_it_out() -> None:
    with pytest.raises(DataError) as caught:
        Condition("none > 3 and score > 1")(ROW)
    assert caught.value.hint == "`has(none) and ...` leaves out such rows"
    assert Condition("has(none) and none > 3")(ROW) is False


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("missing == 1", "the column `missing`, which is missing; the columns are `lang`, `score`"),
        ("none > 3", "it does not fit the row, where `none` is empty"),
        ("len(score) > 3", "it does not fit the row, where `score` is a number"),
        ("score", "it gives a number, not true or false"),
        ("number(lang) > 1", "`number(...)` reads numbers, and not `en`"),
        ("n != 12.5", '`"12.5"` is text and is compared with a number: quotes mean text, and `number(...)`'),
        ("n not in [0, 1]", "is text and is compared with a number"),
        ("n > 3", "is text and is compared with a number"),
        ('score != "0"', "is text and is compared with a number"),
        ('score not in {"0"}', "is text and is compared with a number"),
        ('ok != "false"', "is text and is compared with true"),
        ('tags != "x"', "is text and is compared with a list"),
        ('tags not in ["x"]', "is text and is compared with a list"),
        ("not flag and score > 3", "is text, and neither true nor false"),
        ("n or score > 3", "it gives text"),
        ('n >= "3"', "are ordered by their letters: write `number(...)`"),
        ('day >= "01.02.2024"', "dates are ordered by their letters"),
        ("empty or text", "it gives text"),
        ("empty is not None", "an empty text is compared with null: write `blank(...)`"),
    ],
)
def test_a_condition_that_fails_on_a_row_is_an_error_of_that_row(expression: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Condition(expression)(ROW)
    assert message in caught.value.message
