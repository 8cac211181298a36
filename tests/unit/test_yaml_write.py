"""YAML that other programs read: what is written is read back."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.yaml_files import dump_documents

TEXT = st.text("aZ 0:#-,&*!?\n\t\r'\"{}[]|>~%@`\\\x00\x07\x85\xa0\u2028\ufeff\xe9\U0001f600", max_size=30) | st.sampled_from(
    [
        "no",
        "1",
        "0x1",
        "1e3",
        "~",
        "",
        " a",
        "a\n",
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


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=100)
@given(st.lists(st.dictionaries(TEXT, VALUE, min_size=1, max_size=4), min_size=1, max_size=3), TEXT)
def test_what_is_written_is_read_back(documents: list[dict[str, Any]], comment: str) -> None:
    text = dump_documents(documents, comment)
    assert list(yaml.safe_load_all(text)) == documents
