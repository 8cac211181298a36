"""The cause with which a launcher ended, for the batch script that started it: code 75 alone does not say whether another turn can help."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sft_play.files import write_text
from sft_play.launch.verdict import Outcome

VARIABLE = "SFT_PLAY_CAUSE_FILE"
"""Names the file; set by the script of `make slurm`."""


def tell(outcome: Outcome) -> None:
    """Writes why a rank was lost, in one word, where the file is asked for. One that cannot be written changes nothing."""
    path = os.environ.get(VARIABLE)
    if path and outcome.cause:
        with contextlib.suppress(OSError):
            write_text(Path(path), f"{outcome.cause}\n")
