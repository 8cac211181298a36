"""Wrong configurations by the thousand, each made again by its number, and what may come of one.

    python -m tests.fuzzing 17 4711        # shows the cases of these numbers and what the command says to them

A case is a folder of files (`main.yaml` and what it extends) and words of a command line. `judge` runs `python -m sft_play config` on it
in this process and returns what is wrong with the outcome: a traceback, a hang, an error without words, or a configuration in which
something that was typed is missing or another value.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from sft_play.__main__ import main
from sft_play.config.keys import sections, variables
from sft_play.config.values import RIVALS
from tests.mutations import LOADER, MAIN, Case, bases, cut, make_case

LONGEST_SECONDS = 2.0
"""Of the processor: other work on the machine makes nothing hang."""
LONGEST_PROBLEM = 2_000
"""Characters of one error: nobody reads more."""
MOST_PROBLEMS = 60
CODES = (0, 2, 4, 5)
"""0, configuration, data, run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a case."""

    code: int | None
    """Exit code; `None` where it broke."""
    problem: str | None = None
    """What should not have happened."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value, where it was accepted."""


class _HangError(BaseException):
    """Raised by the clock; nothing catches it on the way."""


@contextlib.contextmanager
def clock(seconds: float) -> Iterator[None]:
    """Raises `_HangError` inside the block after so many seconds of processor time."""

    def ring(_: int, __: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def call_main(words: Sequence[str], seconds: float = LONGEST_SECONDS) -> tuple[int | None, str, str]:
    """Runs a command in this process. Returns (code, stdout, stderr); code `None` and the traceback where it broke or hung."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors) for errors in ("strict", "backslashreplace"))
    code: int | None = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with clock(seconds):
                code = main(list(words))
        except (_HangError, Exception):  # noqa: BLE001 - whatever it is, it is what we look for
            print(traceback.format_exc(limit=-12), file=err)
    for stream in (out, err):
        stream.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined, return-value]


def judge(case: Case, folder: Path, *, again: bool = False) -> Outcome:
    """Loads a case as `make config` does and returns what came of it; `again`: what is printed must mean the same once more."""
    path = case.write(folder)
    words = [word for word in case.words if not word.startswith("JSON=")]
    code, out, err = call_main(["config", f"CONFIG={path}", *words, "JSON=1"])
    if code is None:
        return Outcome(code=None, problem=err)
    if code not in CODES:
        return Outcome(code=code, problem=f"exit code {code}: {err}")
    if code:
        return Outcome(code=code, problem=wrong_with_error(err) or (f"stdout is not empty: {cut(out)}" if out else None))
    config = {key: row["value"] for key, row in json.loads(out, parse_constant=_refuse_constant).items()}
    problem = ignored(case, words, config)
    if again and not problem:
        problem = _printed_differs(path, words, config, folder)
    return Outcome(code=0, problem=problem, config=config)


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")


def _printed_differs(path: Path, words: Sequence[str], config: Mapping[str, Any], folder: Path) -> str | None:
    code, out, err = call_main(["config", f"CONFIG={path}", *words])
    printed = folder / "printed.yaml"
    printed.write_text(out, encoding="utf-8")
    if code or "${" in out:  # `${` that was typed stands for itself, and in a file it does not
        return f"`make config` ends with {code}: {err}" if code else None
    code, out, err = call_main(["config", f"CONFIG={printed}", "JSON=1"])
    if code != 0:
        return f"what `make config` printed is refused: {err}"
    found = {key: row["value"] for key, row in json.loads(out).items()}
    differ = [key for key in config if found.get(key) != config[key]]
    return f"what `make config` printed means another {differ[0]}: {found.get(differ[0])!r}" if differ else None


def wrong_with_error(err: str) -> str | None:
    """Returns what is wrong with a message, if anything: it must be said in words, once, short, and safe for a terminal."""
    errors = [part for part in re.split(r"(?m)^(?=error: )", err) if part.startswith("error: ")]
    if not errors or not err.startswith(("error: ", "note: ")):
        return f"no error is said: {cut(err)}"
    if "Traceback" in err:
        return f"a traceback: {cut(err)}"
    if len(errors) > MOST_PROBLEMS:
        return f"{len(errors)} errors at once"
    for one in errors:
        if len(one) > LONGEST_PROBLEM:
            return f"an error of {len(one)} characters: {cut(one)}"
        if bad := re.search("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2028\\u2029\\u200b\\ud800-\\udfff\\ufeff]", one):
            return f"the error holds {bad[0]!r}: {cut(one)!r}"
        if "`" not in one and not re.match(r"error: \S+: ", one):
            return f"an error without place or name: {cut(one)}"
    return None


NULLS = ("", "~", "null", "Null", "NULL")


def ignored(case: Case, words: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Returns what was typed and is not in `config`, as PyYAML's own loader of plain text and nothing of ours reads it."""
    typed = {**_variables(words)}
    for key, text in typed.items():
        raw = _loaded(text) if isinstance(config.get(key), (list, dict)) else text
        if key not in config or not (same(raw, config[key]) or same(raw.strip() if isinstance(raw, str) else raw, config[key])):
            return f"`{key}` was typed as {cut(repr(text))} and is {cut(repr(config.get(key)))}"
    tree = _loaded(case.files[MAIN].decode("utf-8-sig", "surrogatepass"))
    for key, raw in _leaves(tree, "") if isinstance(tree, dict) else []:
        if (
            key in typed
            or RIVALS.get(key) in typed
            or key == "extends"
            or (key == "train.eval_steps" and "train.eval_strategy" in typed)
        ):
            continue
        if key in RIVALS and raw in NULLS:  # says nothing beside the other way to say it
            continue
        if key not in config or not same(raw, config[key]):
            return f"`{key}` is written as {cut(repr(raw))} and is {cut(repr(config.get(key)))}"
    return None


def _variables(words: Sequence[str]) -> dict[str, str]:
    found = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        key = variables().get(name) or name.removeprefix("--")
        if not equals and word.startswith("--") and rest and key in variables().values():
            text = rest.pop(0)
            equals = "="
        if equals and key in variables().values():
            found[key] = text
    return found


def _loaded(text: str) -> Any:
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, RecursionError, ValueError):  # the other reader is stricter here and there: nothing to compare with
        return None


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, raw in tree.items():
        key = f"{prefix}.{name}" if prefix else name
        if key in sections() and raw in NULLS:
            continue
        if key in sections() and isinstance(raw, dict):
            yield from _leaves(raw, key)
        else:
            yield key, raw


def same(raw: Any, value: Any) -> bool:
    """Whether a resolved value is what was written, quotes aside."""
    if isinstance(raw, dict):
        return isinstance(value, dict) and all(same(part, value.get(name)) for name, part in raw.items())
    if isinstance(raw, list):
        return isinstance(value, list) and len(raw) == len(value) and all(map(same, raw, value))
    if "${" in raw:
        return True  # interpolation has tests of its own
    if value is None or isinstance(value, bool):
        return raw in NULLS if value is None else raw.lower() == str(value).lower()
    if isinstance(value, (int, float)):
        return _number(raw) == value and math.isfinite(value)
    return bool(raw == value)


def _number(raw: str) -> float | None:
    for read in (int, float, lambda text: int(text, 0)):
        with contextlib.suppress(ValueError):
            return read(raw)  # type: ignore[operator, no-any-return]
    return None


def show_cases(numbers: Sequence[int]) -> None:
    """Prints the cases of these numbers with what comes of each."""
    texts = bases()
    for number in numbers:
        case = make_case(number, texts)
        print(case.show())
        with tempfile.TemporaryDirectory() as folder:
            outcome = judge(case, Path(folder), again=True)
            path = Path(folder) / MAIN
            print(f"--- exit code {outcome.code}, problem: {outcome.problem}")
            print(cut(call_main(["config", f"CONFIG={path}", *case.words])[2]))


if __name__ == "__main__":
    show_cases([int(word) for word in sys.argv[1:]])
