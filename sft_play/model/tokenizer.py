"""Load a tokenizer with a padding token and the chosen chat template, and limit the cost of rendering templates."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date, datetime, time
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from sft_play.config.names import TEMPLATES, template_names, unknown_template
from sft_play.config.schema import DataConfig
from sft_play.errors import DataError, UserError, first_line
from sft_play.files import open_plain, read_object, text_sha256, typed_path
from sft_play.model.resolve import code_not_trusted, is_about_trust, runs_code
from sft_play.runs.prepared import ChatFormat, ResolvedModel

MARKER = "\u2402answer\u2403"
"""Placeholder for an answer, to find where a template puts it and what follows."""
BASE_STOPS = "base_stops"
"""Attribute of a tokenizer: the tokens at which the base's own generation settings end an answer."""
DAY = "day"
"""Attribute of a tokenizer that prepares rows: the day that its template uses as today."""


def load_tokenizer(
    folder: Path | str, chat: ChatFormat | None = None, *, trust: bool = False, base: Path | str | None = None
) -> Any:
    """Return the fast tokenizer of `folder` with a padding token and a chat template. No network. Raise `DataError`.

    `chat` is the configured chat format (`ResolvedModel.chat`), `None` for a folder that a run published, whose
    template already contains it. A tokenizer without a template gets ChatML. `trust` is `model.trust_remote_code`.
    `base` is the folder of an adapter's base, whose own settings also say where answers end.
    """
    from transformers import AutoTokenizer

    trust = trust and runs_code(Path(folder))
    try:
        # Without this argument transformers would ask at the terminal whether to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust)
    # For a damaged or hostile file the libraries raise anything; `tokenizers` raises a bare `Exception`.
    except Exception as error:
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
    setattr(tokenizer, BASE_STOPS, [stop for place in (folder, base) if place for stop in base_stops(Path(place))])
    if tokenizer.pad_token_id is None:
        # Labels are masked by length and never by the padding token, so eos can be used without being unlearnt.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if chat is not None and chat.template is not None:
        tokenizer.chat_template = fit_template(chat.template, chat.name, tokenizer) if chat.name else chat.template
    if tokenizer.chat_template is None:
        chatml = _named_text("chatml")
        if _lacking(chatml, tokenizer):
            raise DataError(
                "the tokenizer has no end-of-sequence token, so no answer could end",
                hint="set `eos_token` in its config",
            )
        tokenizer.chat_template = fit_template(chatml, "chatml", tokenizer)
    if chat is not None:
        own = tokenizer.chat_template
        tokenizer.chat_template = (
            {n: add_style(t, chat) for n, t in own.items()} if isinstance(own, dict) else add_style(own, chat)
        )
    return tokenizer


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that end a turn, never empty. Raise `DataError` if there is none.

    They are those that the template writes after an answer and after calls, the tokenizer's eos, and those of the
    base's `generation_config.json` that are not parts of words.
    """
    added = set(tokenizer.added_tokens_decoder)
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    after_ids = _after(tokenizer, {"content": MARKER})
    ids: list[int] = []
    for accepted in (special, added):  # some folders do not mark the end of a turn as special
        ids += [index for index in after_ids if index in accepted][: 0 if ids else 1]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    call = {"type": "function", "id": "qCallId0z", "function": {"name": "call", "arguments": {"of": MARKER}}}
    after_call = _after(tokenizer, {"content": "", "tool_calls": [call]})
    if not set(ids) & set(after_call):  # harmony ends calls and answers differently
        ids += [index for index in after_call if index in special][-1:]
    ids += [index for index in getattr(tokenizer, BASE_STOPS, ()) if index in added]
    if not ids:
        raise DataError("the tokenizer has no token that ends a turn", hint="set `eos_token` in its config")
    return list(dict.fromkeys(ids))


def _after(tokenizer: Any, turn: Mapping[str, Any]) -> list[int]:
    """Return the tokens that the template writes after `MARKER` in an answer, none if it does not write `MARKER`."""
    try:
        text = write_chat(tokenizer, [{"role": "user", "content": "question"}, {"role": "assistant", **turn}])
    except NotAcceptedError:
        return []
    after = text.rsplit(MARKER, 1)[1] if MARKER in text else ""
    return list(tokenizer(after, add_special_tokens=False)["input_ids"]) if after.strip() else []


def writes_day(tokenizer: Any) -> bool:
    """Return whether the tokenizer's template writes today's date."""
    return "strftime_now" in str(tokenizer.chat_template)


def fix_day(tokenizer: Any, day: str) -> None:
    """Make the tokenizer's template use `day` (ISO) as today."""
    setattr(tokenizer, DAY, date.fromisoformat(day))


def ends_of_answers(tokenizer: Any) -> dict[str, Any]:
    """Return generation settings by which any tool ends an answer: at the end of a turn, or at the base's stops."""
    stops = list(dict.fromkeys([*end_of_turn_ids(tokenizer), *getattr(tokenizer, BASE_STOPS, ())]))
    return {
        "eos_token_id": stops,
        "pad_token_id": stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    }


def base_stops(folder: Path) -> list[int]:
    """Return the tokens at which a model folder's own generation settings end an answer, by `config.json` without
    any.
    """
    settings = folder / "generation_config.json"
    declared = read_object(settings if settings.exists() else folder / "config.json", follow=True)
    eos = declared.get("eos_token_id")
    candidates = eos if isinstance(eos, list) else [eos]
    return [index for index in candidates if isinstance(index, int) and not isinstance(index, bool) and index >= 0]


# The chat template (`data.chat_template`), and what `data.system` and `data.style` add to it.


EOS = "eos"
"""Stands for the tokenizer's end-of-sequence token in a template's first comment."""


def chat_format(data: DataConfig) -> ChatFormat | None:
    """Return the configured chat format, or `None` if the tokenizer's own is used.

    Raise `UserError` for an unknown name, a file that is missing or not text, and a template with a syntax error.
    """
    style = {key: value for key, value in asdict(data.style).items() if value}
    if data.chat_template is None and data.system is None and not style:
        return None
    if data.system is not None and not data.system.strip():
        raise DataError("`data.system` is empty", hint="omit it for no system turn")
    name, text = _chosen(data.chat_template) if data.chat_template is not None else (None, None)
    return ChatFormat(name=name, template=text, system=data.system, style=style)


def _chosen(value: str) -> tuple[str | None, str]:
    """Return the name (`None` for a file) and the text of `data.chat_template`."""
    if value in template_names():
        return value, _named_text(value)
    if unknown := unknown_template(value):
        raise unknown
    path = typed_path(value)
    try:
        with open_plain(path, follow=True) as stream:
            text = stream.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template is not UTF-8 text (byte {error.start + 1})", place=str(path)) from None
    except OSError as error:
        hint = f"paths count from the folder in which you typed the command; names are {', '.join(template_names())}"
        raise DataError(f"the chat template cannot be read: {error.strerror}", place=str(path), hint=hint) from None
    if not text.strip():
        raise DataError("the chat template is empty", place=str(path))
    check_syntax(text, str(path))
    return None, text


def check_syntax(text: str, place: str) -> None:
    """Raise `DataError` with the line of a template that is not Jinja."""
    import jinja2
    import jinja2.ext

    # transformers adds the tag `generation`, which marks the assistant's text; importing it would take seconds.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
    try:
        jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(plain)
    except RecursionError:
        raise DataError("the chat template nests without end", place=place) from None
    except jinja2.TemplateSyntaxError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
        raise DataError(
            f"the chat template has a syntax error: {error.message}: `{line}`",
            place=f"{place}:{error.lineno}",
            hint="`{% for %}` and `{% if %}` need their `{% endfor %}` and `{% endif %}`; `{{ }}` writes a value",
        ) from None


def fit_template(text: str, name: str, tokenizer: Any) -> str:
    """Return a named template with the tokenizer's end-of-turn token, and BOS if the tokenizer adds one to texts.

    Raise `DataError` if the vocabulary lacks tokens that the template needs.
    """
    if lacking := _lacking(text, tokenizer):
        fitting = [other for other in template_names() if not _lacking(_named_text(other), tokenizer)]
        raise DataError(
            f"the chat template `{name}` needs tokens that the tokenizer lacks:"
            f" {', '.join(f'`{token}`' for token in lacking)}",
            hint=(
                f"omit `data.chat_template` for the model's own template, or use one of {', '.join(fitting) or 'none'}"
            ),
        )
    _, end, _ = _header(text)
    if end not in (EOS, *tokenizer.get_vocab()):
        text = text.replace(f"set end = '{end}'", f"set end = {jinja_literal(tokenizer.eos_token)}")
    if "bos_token" not in text and adds_bos(tokenizer):
        text = "{{- bos_token -}}" + text
    return text


def end_note(name: str, tokenizer: Any) -> str | None:
    """Return a note if a named template ends turns with another token than usual, else `None`."""
    _, end, _ = _header(_named_text(name))
    if end in (EOS, *tokenizer.get_vocab()):
        return None
    return f"chat template `{name}`: the vocabulary has no `{end}`, so turns end with `{tokenizer.eos_token}`"


def continue_texts(tokenizer: Any) -> bool:
    """Let the template write the texts of turns alone, as documents are learnt, and return true; but not that of a
    tokenizer that came with its own.
    """
    chatml = _named_text("chatml")
    if _lacking(chatml, tokenizer) or tokenizer.chat_template != fit_template(chatml, "chatml", tokenizer):
        return False
    bos = "{{- bos_token -}}" if adds_bos(tokenizer) else ""
    tokenizer.chat_template = bos + "{%- for message in messages %}{{ message['content'] }}{% endfor %}"
    return True


def adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts the beginning-of-sequence token before a text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _named_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def _lacking(text: str, tokenizer: Any) -> list[str]:
    """Return the tokens that a named template needs and the tokenizer lacks."""
    needs, end, or_eos = _header(text)
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in needs if token not in vocabulary]
    if end not in vocabulary and (tokenizer.eos_token is None or not or_eos):
        missing.append(end)
    return missing


def _header(text: str) -> tuple[list[str], str, bool]:
    """Read a named template's first comment: needed tokens, end-of-turn token, and whether eos can replace it."""
    needs = re.search(r"^ *needs: (.+)$", text, re.MULTILINE)
    end = re.search(r"^ *end: (\S+)( or eos)?$", text, re.MULTILINE)
    token = end.group(1) if end else EOS
    return needs.group(1).split() if needs else [], token, token == EOS or bool(end and end.group(2))


def add_style(template: str, chat: ChatFormat) -> str:
    """Return a template that first applies `data.system` and `data.style` to every conversation."""
    if chat.system is None and not chat.style:
        return template
    lines = ["{%- set styled = namespace(turns=[]) -%}"]
    if chat.system is not None:
        lines.append(
            "{%- if not messages or messages[0]['role'] not in ['system', 'developer'] -%}"
            f"{{%- set messages = [{{'role': 'system', 'content': {jinja_literal(chat.system)}}}] + messages -%}}"
            "{%- endif -%}"
        )
    lines.append("{%- for message in messages -%}")
    for role in ("system", "user"):
        before, after = (jinja_literal(chat.style.get(f"{role}_{place}", "")) for place in ("prefix", "suffix"))
        lines.append(
            f"{{%- if message['role'] == '{role}' and message['content'] is string -%}}"
            f"{{%- set message = dict(message, content={before} + message['content'] + {after}) -%}}"
            "{%- endif -%}"
        )
    lines.append("{%- set styled.turns = styled.turns + [message] -%}{%- endfor -%}{%- set messages = styled.turns -%}")
    return "".join(lines) + template


def jinja_literal(text: str) -> str:
    """Return `text` as a Jinja literal; Jinja accepts Python's escapes."""
    escaped = (
        text.encode("unicode_escape").decode("ascii").replace("'", "\\'").replace("{", "\\x7b").replace("}", "\\x7d")
    )
    return f"'{escaped.replace('%', chr(92) + 'x25').replace('#', chr(92) + 'x23')}'"


def with_chat(model: ResolvedModel, chat: ChatFormat | None) -> ResolvedModel:
    """Return the model with the chat format `chat`, which changes its tokenizer's fingerprint."""
    if chat is None:
        return model
    settings = json.dumps(asdict(chat), sort_keys=True)
    return replace(model, chat=chat, tokenizer_fingerprint=text_sha256(f"{model.tokenizer_fingerprint}\n{settings}"))


# A chat template is a program, perhaps a stranger's. Every rendering goes through here and has limits.


SECONDS = 10.0
"""CPU time that a rendering may take; a long conversation takes milliseconds."""
AGAIN_SECONDS = 1.0
"""Interval at which the limit is repeated, since an exception that a signal raises in a destructor is lost."""
HINT = "`data.chat_template` chooses another template"


class EndlessError(UserError):
    """Foreign code that takes too long; not a `DataError`, which is recorded row by row: every row would take long."""

    exit_code = DataError.exit_code


class _OutOfTime(BaseException):
    """Not an `Exception`, because jinja and pypdf swallow those in places."""


class NotAcceptedError(DataError):
    """A conversation that a chat template does not accept."""


def write_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, day: date | None = None, **options: Any
) -> str:
    """Return the text that the tokenizer's chat template writes, with `day` as today.

    Raise `NotAcceptedError` for a conversation that the template does not accept, `EndlessError` for a template that
    takes too long, `DataError` for one that needs too much memory.
    """
    import jinja2

    place = str(getattr(tokenizer, "name_or_path", None) or "chat template")
    # gpt-oss's template reads `thinking`; transformers 5.17 does not pass that name, later releases do.
    turns = [
        {"thinking": turn["reasoning_content"], **turn} if "reasoning_content" in turn else turn for turn in messages
    ]
    if WANTS_NINE.search(str(tokenizer.chat_template)):
        turns = _with_mistral_ids(turns)
    message = f"the chat template did not finish within {SECONDS:g} s of CPU time"
    limit = in_time(SECONDS, message, place=place, hint=HINT)
    try:
        with on_day(day or getattr(tokenizer, DAY, None)), limit:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    except (RecursionError, MemoryError) as error:
        what = "nests without end" if isinstance(error, RecursionError) else "needs more memory than there is"
        raise DataError(f"the chat template {what}", place=place, hint=HINT) from None
    except (jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        roles = ", ".join(str(turn["role"]) for turn in messages)
        raise NotAcceptedError(f"the chat template does not accept this conversation ({roles}): {error}") from error


WANTS_NINE = re.compile(r"id\s*\|\s*length\s*!=\s*9")
"""Part of Mistral's templates, which refuse calls without an id of nine characters; data sets have other ids."""


def _with_mistral_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return turns whose call ids have nine characters; results without an id belong to the calls in order."""

    def short(name: str) -> str:
        return name if re.fullmatch("[a-zA-Z0-9]{9}", name) else text_sha256(name)[:9]

    turns: list[Mapping[str, Any]] = []
    waiting: list[str] = []
    for turn in messages:
        changes: dict[str, Any] = {}
        if calls := turn.get("tool_calls"):
            waiting = [short(str(call.get("id") or f"{len(turns)}.{index}")) for index, call in enumerate(calls)]
            changes = {"tool_calls": [{**call, "id": name} for call, name in zip(calls, waiting, strict=True)]}
        elif turn["role"] == "tool":
            call_id = turn.get("tool_call_id")
            name = short(call_id) if call_id else waiting[0] if waiting else short(str(len(turns)))
            waiting = [other for other in waiting if other != name]
            changes = {"tool_call_id": name}
        turns.append({**turn, **changes})
    return turns


@contextlib.contextmanager
def on_day(day: date | None) -> Iterator[None]:
    """Make templates use `day` as today in the body, by replacing transformers' clock: a passed one becomes text."""
    if day is None:
        yield
        return
    from transformers.utils import chat_template_utils as library

    midnight, clock = datetime.combine(day, time()), library.datetime
    library.datetime = SimpleNamespace(now=lambda: midnight)
    try:
        yield
    finally:
        library.datetime = clock


@contextlib.contextmanager
def in_time(seconds: float, message: str, *, place: str, hint: str) -> Iterator[None]:
    """Raise `EndlessError` with this message if the body takes more CPU time.

    It works in a process's main thread, where all our rendering and reading happens; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _install_time_limit()
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
        yield
    except _OutOfTime:
        raise EndlessError(message, place=place, hint=hint) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _install_time_limit() -> None:
    """Install the signal handler once, since that takes longer than rendering a short conversation."""

    def stop(_: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGVTALRM, stop)
