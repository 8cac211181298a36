"""Every rendering of a chat template goes through here: a template is a program that came with somebody's model, and may never end."""

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
"""Jinja's compiler passes over an error in what it computes ahead, so the limit is repeated."""


class EndlessTemplateError(UserError):
    """A chat template that takes too long. No `DataError`: those are noted row by row, and every row would take as long."""

    exit_code = DataError.exit_code


def write_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns what the tokenizer's chat template writes. Raises `EndlessTemplateError`, `DataError`, and what the template raises."""
    with in_time(tokenizer):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


@contextlib.contextmanager
def in_time(tokenizer: Any) -> Iterator[None]:
    """Raises `EndlessTemplateError` in a body that takes more than `SECONDS` of CPU time, `DataError` where it asks for too much memory.

    Works in a process's main thread, where all our rendering is done; another thread has no limit.
    """
    place = str(getattr(tokenizer, "name_or_path", None) or "chat template")
    hint = "`data.chat_template` chooses another template"

    def stop(_: int, __: FrameType | None) -> None:
        raise EndlessTemplateError(f"the chat template was not done after {SECONDS:g} s of computing", place=place, hint=hint)

    limited = threading.current_thread() is threading.main_thread()
    try:
        if limited:
            before = signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, AGAIN_SECONDS)
        yield
    except (RecursionError, MemoryError) as error:
        what = "nests without end" if isinstance(error, RecursionError) else "asks for more memory than there is"
        raise DataError(f"the chat template {what}", place=place, hint=hint) from None
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
