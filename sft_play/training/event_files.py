"""The order of TensorBoard's event files, which goes by the times in their names."""

from __future__ import annotations

import re
import time
from pathlib import Path

NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.(.*)")


def put_in_order(folder: Path) -> None:
    """Gives event files an older time in their names where the clock has been set back since they were written.

    A resumed run's file says which steps of the files before it are void: read before them, it would be void itself.
    """
    found = [(path, match) for path in sorted(folder.glob("events.out.tfevents.*")) if (match := NAME.fullmatch(path.name))]
    if not any(int(match[1]) >= int(time.time()) for _, match in found):
        return
    for number, (path, match) in enumerate(found):
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.{match[2]}"))
