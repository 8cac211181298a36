"""A pickle that shows whether it was read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Evil:
    """Makes the folder `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)
