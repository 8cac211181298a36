"""A console that may go while a run goes on: `make train | head`, a closed window, a lost connection."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Console(io.TextIOBase):
    """A text stream until its reader goes; from then on what is written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_gone = False

    def write(self, text: str) -> int:
        with self._may_go():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._may_go():
            self._stream.flush()

    def isatty(self) -> bool:
        return not self.has_gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _may_go(self) -> Iterator[None]:
        if self.has_gone:
            with contextlib.suppress(OSError):
                yield
            return
        try:
            yield
        except OSError:  # EPIPE of a pipe, EIO of a terminal
            self.has_gone = True
            with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # for the rest of the buffer, and for children


@contextlib.contextmanager
def console_may_go() -> Iterator[None]:
    """Lets nothing that is printed within end this process because nobody reads it."""
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err = Console(kept[0]), Console(kept[1])
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = kept
