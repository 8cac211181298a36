"""What `make inspect` prints is data: no markup and no escape of a row or a name reaches the terminal as such."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.inspection import Piece, Sample, show


def test_names_and_rows_are_shown_letter_for_letter(capsys: pytest.CaptureFixture[str]) -> None:
    manifest: dict[str, Any] = {
        "split": {"rows": 3},
        "sources": [
            {
                "name": "[/chat] :smile:",
                "dropped": {"longer": 1},
                "duplicates": 0,
                "cut": 0,
                "left_out": [{"reason": "longer", "place": "[/x]:1"}],
            }
        ],
    }
    pieces = (
        Piece(text="[/b] \x1b[2Jread", trained=False, special=False, tokens=2),
        Piece(text="\x1b]0;x\x07learnt\n", trained=True, special=False, tokens=2),
    )
    sample = Sample(index=0, row=0, source="[/chat] \x1b[1m", pieces=pieces, tokens=3, trained=1)
    show("train", manifest, [sample], None, None)
    shown = capsys.readouterr().out
    assert "skipped in [/chat] :smile:: 1 (longer): [/x]:1" in shown and "train row 0 of [/chat] \\x1b[1m" in shown
    assert "[/b] \\x1b[2Jread" in shown and "\\x1b]0;x\\x07learnt↵" in shown
    assert "\x1b" not in shown
