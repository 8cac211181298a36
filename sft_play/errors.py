"""The tree of errors that a user can cause or must act on, each with the exit code of the command.

    UserError              2   configuration or usage
    ├── HardwareError      3   environment or hardware
    ├── DataError          4   data
    ├── CheckpointError    5   checkpoint or stamp
    └── RetryableError    75   a peer was lost or memory ran out for good: worth trying again

A `UserError` is printed without a traceback. Anything else that reaches the top is our own bug: traceback, exit code 1.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """One or more problems that the user can mend.

    `place` comes first in the message (`configs/demo.yaml:6`), literals stand in backticks, and `hint` says what to do.
    """

    exit_code = 2

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def render(self) -> str:
        """Returns the text that is printed on stderr, without a final newline."""
        where = f"{self.place}: " if self.place else ""
        text = f"error: {where}{self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class HardwareError(UserError):
    """The environment or the hardware does not allow what was asked."""

    exit_code = 3


class DataError(UserError):
    """The data, a tokenizer or a chat template cannot be used as asked."""

    exit_code = 4


class CheckpointError(UserError):
    """A run, a checkpoint or a stamp does not allow what was asked."""

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
        return "\n\n".join(p.render() for p in self.problems)


def raise_all(problems: Sequence[UserError]) -> None:
    """Raises nothing for no problem, the problem itself for one, `Problems` for more."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)
