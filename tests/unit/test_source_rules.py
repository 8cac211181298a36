"""Entries of `data.sources` that mean nothing are refused when the configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.config.load import load_config
from sft_play.errors import UserError


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            "[{path: a.jsonl, weight: -1}, {path: b.jsonl, weight: 1}]",
            "`data.sources[0].weight` is -1; a share cannot be negative",
        ),
        ("[{path: a.jsonl, weight: 0}, {path: b.jsonl, weight: 0}]", "all weights of `data.sources` are 0"),
        ("[{path: a.jsonl, weight: 3}, {path: b.jsonl}]", "`data.sources[1]` has no `weight`"),
        ("[{path: a.jsonl, name: x}, {path: b.jsonl, name: x}]", "two sources with the name `x`"),
        ("[{path: a.jsonl, format: sharegtp}]", "did you mean `sharegpt`"),
        ("[{path: a.jsonl, colums: {a: b}}]", "did you mean `columns`"),
        ("[{path: a.jsonl}]\n  validation: [{path: b.jsonl, weight: 1}]", "validation is not mixed"),
        ("[{path: a.jsonl, filter: 'lang =='}]", "`data.sources[0].filter` cannot be used: invalid syntax at character "),
    ],
)
def test_what_a_source_cannot_mean_is_refused_with_its_place(sources: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model:\n  name: x/y\ndata:\n  sources: {sources}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path, environ={})
    assert said in caught.value.render()
    assert f"{path}:" in caught.value.render()
