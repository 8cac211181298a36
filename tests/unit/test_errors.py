"""What a library says of its own failure, in one line."""

from __future__ import annotations

import pytest

from sft_play.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError(" \n the cause\n"), "the cause"),
        (EOFError(), "EOFError"),
        (KeyError("a"), "'a'"),
    ],
)
def test_the_first_line_or_the_kind(error: Exception, said: str) -> None:
    assert first_line(error) == said
