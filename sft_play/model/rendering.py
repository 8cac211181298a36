"""What a stranger wrote and this process computes has a limit. Every rendering of a chat template, which is a program, goes through here."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from sft_play.errors import DataError, UserError

SECONDS = 10.0
"""CPU time that one rendering may take; a long conversation takes milliseconds."""
AGAIN_SECONDS = 1.0
"""An exception that a signal raises in a destructor is lost, so the limit is repeated."""
HINT = "`data.chat_template` chooses another template"


class EndlessError(UserError):
    """A stranger's work that takes too long. No `DataError`: those are noted row by row, and every row would take as long."""

    exit_code = DataError.exit_code


class _OutOfTime(BaseException):
    """No `Exception`: jinja and pypdf pass over those in places."""


def write_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns what the tokenizer's chat template writes. Raises `EndlessError`, `DataError`, and what the template raises."""
    with template_in_time(tokenizer):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


@contextlib.contextmanager
def template_in_time(tokenizer: Any) -> Iterator[None]:
    """Raises `EndlessError` in a body whose template takes too long, `DataError` where it asks for too much memory."""
    place = str(getattr(tokenizer, "name_or_path", None) or "chat template")
    try:
        with in_time(SECONDS, f"the chat template was not done after {SECONDS:g} s of computing", place=place, hint=HINT):
            yield
    except (RecursionError, MemoryError) as error:
        what = "nests without end" if isinstance(error, RecursionError) else "asks for more memory than there is"
        raise DataError(f"the chat template {what}", place=place, hint=HINT) from None


@contextlib.contextmanager
def in_time(seconds: float, message: str, *, place: str, hint: str) -> Iterator[None]:
    """Raises `EndlessError` with this message in a body that takes more CPU time.

    Works in a process's main thread, where all our rendering and reading is done; another thread has no limit.
    """

    def stop(_: int, __: FrameType | None) -> None:
        raise _OutOfTime

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
        yield
    except _OutOfTime:
        raise EndlessError(message, place=place, hint=hint) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
