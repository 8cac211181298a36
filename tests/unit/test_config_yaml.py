"""YAML 1.2 as read and written: the meaning of scalars, the places of values, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.reader import misfit
from sft_play.config.yaml_files import dump_documents, parse_yaml, read_yaml
from sft_play.errors import UserError
from sft_play.plan.plan import RankPlan


def parsed(text: str) -> object:
    return parse_yaml(text, "x.yaml").plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("2e-4", 2e-4),
        (".5", 0.5),
        ("1e5", 1e5),
        ("0012", 12),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'no'", "no"),
        ("<<", "<<"),
    ],
)
def test_plain_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    values = parsed(f"a: {text}")
    assert values == {"a": value} and type(values["a"]) is type(value)  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [1, 2\n", "x.yaml:3:1: not YAML"),
        ("a:\n\t- 1\n", "x.yaml:2:1: not YAML"),
        ("a: 1\na: 2\n", "x.yaml:2: `a` is here and in line 1"),
        ("a: !!python/object/apply:os.system [echo]\n", "the tag `!!python/object/apply:os.system` is not allowed"),
        ("a: &x [*x]\n", "nested too deeply"),
        ("? [a, b]\n: 1\n", "a key is a list or a mapping"),
        ("[" * 5000, "nested too deeply"),
        (
            "a0: &a0 [x, x, x]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)),
            "once aliases are written out",
        ),
    ],
    ids=lambda text: text[:12],
)
def test_unreadable_data_are_one_error_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(text)
    shown = caught.value.render()
    assert expected in shown and shown.startswith("error: x.yaml") and shown.count("error: ") == 1


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(UserError, match="not UTF-8 text") as caught:
        read_yaml(path)
    assert caught.value.place == f"{path}:2"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert read_yaml(path).plain() == {"a": 1, "b": "x"}
    path.write_bytes(b"#" * (5 * 2**20))
    for wrong, message in (
        (path, "expected a configuration file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "missing", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            read_yaml(wrong)


TEXT = st.text(
    "aZ 0:#-,&*!?\n\t\r'\"{}[]|>~%@`\\\x00\x07\x85\xa0\u2028\ufeff\xe9\U0001f600", max_size=30
) | st.sampled_from(
    [
        "no",
        "1",
        "0x1",
        "1e3",
        "~",
        "",
        " a",
        "a\n\n",
        "\na",
        "a\n b\n",
        "a: b",
        "- a",
        "#",
        "a\tb",
        "a\r\nb",
        "---",
        "|",
        "y",
    ]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.lists(st.dictionaries(TEXT, VALUE, min_size=1, max_size=4), min_size=1, max_size=3), TEXT)
def test_written_yaml_is_read_back(documents: list[dict[str, Any]], comment: str) -> None:
    text = dump_documents(documents, comment)
    assert list(yaml.safe_load_all(text)) == documents


@pytest.mark.parametrize(
    ("value", "annotation", "wrong"),
    [
        (1, float, None),
        (True, int, ""),
        (10**30, int, ""),
        (None, int | None, None),
        ("a", Literal["a", "b"], None),
        ([], Literal["a"], ""),
        ({"a": [1, "x"]}, Mapping[str, list[int]], "a.1"),
        ({"a": 1, "b": "x"}, {"a": int}, None),
        ({"a": {"b": "x"}}, {"a": {"b": int}}, "a.b"),
        ([], {"a": int}, ""),
        ({"rank": "x"}, RankPlan, "rank"),
        ({}, RankPlan, None),
    ],
)
def test_values_of_parsed_json_are_checked_against_their_types(value: Any, annotation: Any, wrong: str | None) -> None:
    assert misfit(value, annotation) == wrong
