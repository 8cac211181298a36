"""Loads a tokenizer with a padding token and a chat template, and limits what rendering a stranger's template may cost."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sft_play.data.templates import add_style, adds_bos, fit_template, jinja_literal
from sft_play.errors import DataError, UserError, first_line
from sft_play.model.resolve import code_not_trusted, is_about_trust, runs_code
from sft_play.runs.prepared import ChatFormat

MARKER = "\u2402answer\u2403"
"""Stands for an answer when a template is rendered to see where it stands and what follows it."""


def load_tokenizer(folder: Path | str, chat: ChatFormat | None = None, *, trust: bool = False) -> Any:
    """Return the fast tokenizer of `folder` with a padding token and a chat template. No network. Raise `DataError`.

    `chat` is what the configuration says about writing conversations (`ResolvedModel.chat`), `None` for a folder that a run
    published: its template holds that already. `trust` is `model.trust_remote_code`.
    """
    from transformers import AutoTokenizer

    trust = trust and runs_code(Path(folder))
    try:
        # Without a word about trust transformers would ask at the terminal whether to run the code that a folder holds.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # of a damaged or hostile file the libraries raise anything, tokenizers a bare `Exception`
        if not trust and is_about_trust(error):
            raise code_not_trusted("tokenizer", str(folder)) from error
        first = first_line(error)
        raise DataError(f"no tokenizer can be loaded: {first}", place=str(folder)) from error
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer has no fast version, and the exact label mask needs its character offsets",
            place=str(folder),
            hint="use a model folder with a `tokenizer.json`",
        )
    if tokenizer.pad_token_id is None:
        # Labels are masked by length and never by the padding token, so eos can stand in without being unlearnt.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if chat is not None and chat.template is not None:
        tokenizer.chat_template = fit_template(chat.template, chat.name, tokenizer) if chat.name else chat.template
    if tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    if chat is not None:
        own = tokenizer.chat_template
        tokenizer.chat_template = (
            {n: add_style(t, chat) for n, t in own.items()} if isinstance(own, dict) else add_style(own, chat)
        )
    return tokenizer


def default_template(tokenizer: Any) -> str:
    """Return ChatML for a tokenizer that has no template; its end mark is a token that the vocabulary has.

    Raise `DataError` when there is neither `<|im_end|>` nor an end-of-sequence token.
    """
    vocabulary = tokenizer.get_vocab()
    end = "<|im_end|>" if "<|im_end|>" in vocabulary else tokenizer.eos_token
    if end is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so no answer could end", hint="set `eos_token` in its config"
        )
    return (
        (f"{{{{ {jinja_literal(tokenizer.bos_token)} }}}}" if adds_bos(tokenizer) else "")
        + "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
        + jinja_literal(end)
        + " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that end an assistant's turn: the one that the template writes, then eos; never empty.

    Raise `DataError` when there is none.
    """
    import jinja2

    found: list[int] = []
    try:
        text = write_chat(tokenizer, [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKER}])
    except (jinja2.TemplateError, TypeError, KeyError, ValueError):
        text = ""
    after = text.rsplit(MARKER, 1)[1] if MARKER in text else ""
    special = set(tokenizer.all_special_ids) | {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after.strip() else []
    for known in (special, set(tokenizer.added_tokens_decoder)):  # some folders forget to call the end of a turn special
        found += [index for index in after_ids if index in known][: 0 if found else 1]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in found:
        found.append(tokenizer.eos_token_id)
    if not found:
        raise DataError("the tokenizer has no token that ends a turn", hint="set `eos_token` in its config")
    return found


# What a stranger wrote and this process computes has a limit. Every rendering of a chat template, which is a program, goes through here.


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
    """Return what the tokenizer's chat template writes.

    Raise `EndlessError` for one that takes too long, `DataError` for one that asks for too much memory, and what the template raises.
    """
    place = str(getattr(tokenizer, "name_or_path", None) or "chat template")
    try:
        with in_time(SECONDS, f"the chat template was not done after {SECONDS:g} s of computing", place=place, hint=HINT):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (RecursionError, MemoryError) as error:
        what = "nests without end" if isinstance(error, RecursionError) else "asks for more memory than there is"
        raise DataError(f"the chat template {what}", place=place, hint=HINT) from None


@contextlib.contextmanager
def in_time(seconds: float, message: str, *, place: str, hint: str) -> Iterator[None]:
    """Raise `EndlessError` with this message in a body that takes more CPU time.

    Works in a process's main thread, where all our rendering and reading is done; another thread has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heed_limits()
    _passed.clear()
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
        yield
        if _passed:  # raised inside a callback of the garbage collector, where Python drops an exception
            raise _OutOfTime
    except _OutOfTime:
        raise EndlessError(message, place=place, hint=hint) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


_passed: list[int] = []
"""Holds something when the limit has passed."""


@functools.cache
def _heed_limits() -> None:
    """Take the signal over, once: Python needs longer for that than to render a short conversation."""

    def stop(number: int, _: FrameType | None) -> None:
        _passed.append(number)
        raise _OutOfTime

    signal.signal(signal.SIGVTALRM, stop)
