"""Errors that a user can cause or must act on, each with the exit code of the command.

    UserError              2   configuration or usage
    ├── HardwareError      3   environment or hardware
    ├── DataError          4   data
    ├── CheckpointError    5   checkpoint or stamp
    └── RetryableError    75   a peer was lost or memory ran out for good: worth trying again

A `UserError` is printed without a traceback. Anything else that reaches the top is our own bug: traceback, exit code 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(hf_|api_org_|gh[pousr]_|sk-)[A-Za-z0-9]{16}"
    r"|(sk-(?:proj|ant|svcacct|admin|or)-|github_pat_|glpat-)[A-Za-z0-9_-]{16}"
    r"|(xox[abeprs]-)[A-Za-z0-9-]{10}|(AKIA|ASIA)[A-Z0-9]{16}"
    r"|(https://(?:hooks\.slack(?:-gov)?\.com|(?:[\w-]+\.)?discord(?:app)?\.com/api|[\w.-]+\.webhook\.office\.com)/)"
    r"[\w/@.~-]{16,}"
    r")(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-]))*"
)
"""Complete tokens of the hub, GitHub, GitLab, OpenAI, Anthropic, Slack and AWS, and webhooks, recognised by their
prefix.
"""
NAMED = re.compile(
    r"""((?:token|api_?key|secret|access_key|passw(?:or)?d)["'`]?\s*[=:]\s*["'`]?)[0-9a-f]{40}(?![0-9a-f])""",
    re.IGNORECASE,
)
"""Tokens without a prefix (Weights & Biases), recognised by the name before them, since commits look alike."""

SECRET = re.compile(
    r"(.*[_.])?(token|api_?key|secret|secret_key|access_key|master_key|password|passwd|credentials?)", re.IGNORECASE
)
"""Names of values that must never be in a file or on a command line."""
SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASSW|PASSPHRASE|API_?KEY|PRIVATE|CREDENTIAL|COOKIE|AUTH(?!OR)"
    r"|_(KEY|PASS|PWD|PW|PIN|JWT|SESSION)(?![A-Z0-9])",
    re.IGNORECASE,
)
"""Part of the names of environment variables whose values are never shown nor used in a configuration."""
USER_IN_URL = re.compile(r"(?<=://)\S*@")
"""User and password of a URL, up to the last `@`: a password may contain slashes and `@`, and hiding too much does no
harm.
"""
SECRET_IN_URL = re.compile(
    r"([?&;#][^=&;#\s]*(?:token|key|secret|passw|auth|sig|credential)[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE
)
SECRET_VALUE = re.compile(r"-----BEGIN|eyJ[\w-]{8,}\.[\w-]+\.")
"""How keys in PEM and JSON web tokens begin."""

IN_WHEEL = Path(__file__).resolve().parent / "shipped"
"""What an installation from a wheel has in place of a clone's folders (`setup.py`)."""
COMMAND = re.compile(r"\bmake (?!install)(?=[a-z]+(?:-[a-z]+)*(?:[`,;)]|$| [A-Z][A-Z_0-9]+=| \.\.\.))", re.MULTILINE)
"""`make` before a command: in backticks, with variables, or at a line's end."""
CONFIGURED = re.compile(r"CONFIG=\.\.\.(.*)")
"""A configuration in a command that is to be typed, and the rest of its line."""
configured: list[str] = []
"""The words that chose the configuration of this call, as a shell takes them."""
PAGE = re.compile(r"(?<![\w./-])docs/(?=[a-z-]+\.md)")
MOST_PROBLEMS = 120
"""Most problems that are printed."""
HUB_LOGIN = "`.venv/bin/hf auth login` (or your own environment's `hf`)"
"""Command that saves the hub's token in the user's home; the environment's programs are usually not on the PATH."""


def without_tokens(text: str) -> str:
    """Return `text` with each token shortened to its prefix."""
    return NAMED.sub(r"\1...", TOKEN.sub(lambda match: f"{next(filter(None, match.groups()))}...", text))


def mask(name: str, value: str) -> str:
    """Return `value`, or its length if its name or form suggests a secret; in a URL only user, password and keys are
    masked.
    """
    if SECRET_VARIABLE.search(name) or TOKEN.search(value) or SECRET_VALUE.search(value):
        return f"({len(value)} letters, not shown)"
    return SECRET_IN_URL.sub(r"\1(not shown)", USER_IN_URL.sub("(not shown)@", value))


def without_secret(origin: str, name: str) -> str:
    """Return an origin (`make NAME=value`) without the value if `name`, or its key, is the name of a secret."""
    head, equals, _ = origin.partition("=")
    return f"{head}=..." if equals and SECRET.fullmatch(name) else origin


class UserError(Exception):
    """A problem that the user can fix.

    `place` comes first in the message (`configs/demo.yaml:6`), literals are in backticks, and `hint` says what to do.
    """

    exit_code = 2

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def render(self) -> str:
        """Return the text for stderr, without a final newline."""
        place = safe_text(self.place or "").replace("\n", "\\n")
        where = f"{place}: " if self.place else ""
        text = f"error: {where}{safe_text(self.message)}"
        return typed_here(f"{text}\n\nhint: {safe_text(self.hint)}" if self.hint else text)


class HardwareError(UserError):
    """The environment or the hardware does not allow the request."""

    exit_code = 3


class DataError(UserError):
    """The data, a tokenizer or a chat template cannot be used as requested."""

    exit_code = 4


class MissingColumn(DataError):
    """A row lacks a column that the configuration names."""


class CheckpointError(UserError):
    """A run, a checkpoint or a stamp does not allow the request."""

    exit_code = 5


class RetryableError(UserError):
    """A peer was lost or memory ran out for good; the same command may succeed later."""

    exit_code = 75


class Problems(UserError):
    """Several problems of one kind, reported together."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        assert problems, "Problems needs at least one problem"
        super().__init__("; ".join(p.message for p in problems))
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code

    def render(self) -> str:
        """Return the first problems and the number of the others."""
        hidden = len(self.problems) - MOST_PROBLEMS
        rest = f"\n\n... and {hidden} more errors" if hidden > 0 else ""
        return "\n\n".join(p.render() for p in self.problems[:MOST_PROBLEMS]) + rest


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, with what it announces, or its type if it has no message."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


def raise_all(problems: Sequence[UserError]) -> None:
    """Raise the problem, or `Problems` for several; do nothing for none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)


def by_make() -> bool:
    """Return whether commands are typed as `make NAME`: in a clone, and with the Makefile of `sft-play init`."""
    return not IN_WHEEL.is_dir() or "MAKELEVEL" in os.environ


def typed_here(text: str) -> str:
    """Return `text` with its commands and pages as they are found here: `sft-play NAME` where no Makefile is used, and
    `CONFIG=...` as it was typed.
    """
    if configured:
        text = CONFIGURED.sub(_with_configuration, text)
    if by_make():
        return text
    return PAGE.sub("docs/" if Path("docs").is_dir() else f"{IN_WHEEL}/docs/", COMMAND.sub("sft-play ", text))


def _with_configuration(match: re.Match[str]) -> str:
    words = [word for word in configured if f" {word.partition('=')[0]}=" not in match[1]]
    return " ".join(words) + match[1]


def safe_text(text: str) -> str:
    """Return `text` for a terminal, without tokens and with control and bidirectional characters escaped."""
    return printable(without_tokens(text))


def printable(text: str) -> str:
    """Return `text` with control and bidirectional characters escaped, except line ends."""
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\t\xa0\u3000" else c.encode("unicode_escape").decode("ascii") for c in line
    )


def causes(error: BaseException, *, handled: bool = True) -> Iterator[BaseException]:
    """Yield an error and its causes; with `handled` also the errors that were being handled when it was raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if handled else None)
