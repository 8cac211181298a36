"""`make infer RUN=` (or `MODEL=`): one answer (`PROMPT=`), answers to a file (`INPUT=`, `OUTPUT=`), or a conversation
at the terminal.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sft_play.config.data_rules import MISSING, NO_CHAT, look_up
from sft_play.config.reader import names_of
from sft_play.data import Message
from sft_play.data.answers import call_text
from sft_play.data.bad_rows import Faults
from sft_play.data.formats import FORMATS, understand
from sft_play.data.readers import TABLES, Placed, csv_marks, read_file
from sft_play.data.sources import rename
from sft_play.data.streams import kind, open_bytes, to_utf8
from sft_play.data.turns import CALLS, ROLE_NAMES, part_by_name
from sft_play.data.values import list_of, text_of
from sft_play.errors import DataError, UserError, raise_all
from sft_play.files import finite, typed_path, write_text
from sft_play.launch.run_folder import find_run
from sft_play.runs.adapters import run_around
from sft_play.runs.checkpoints import label_of, plain_model, weights_folder
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import common_system, needs_system
from sft_play.text import as_typed, bar, plural, tell

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.schema import Config
    from sft_play.data.answers import AnswerParts
    from sft_play.evaluation.generation import Answer, AnswerSettings

Messages = list[dict[str, Any]]

SETTINGS = frozenset({"train.generation_max_new_tokens", "train.generation_num_beams", "eval.batch_size"})
"""Keys of a run that may be changed for answering."""
OF_A_MODEL = SETTINGS | {"model.revision", "model.trust_remote_code"}
"""Keys that may be changed for a model without a run."""
BATCH_SIZE = 8
"""Prompts answered together without a plan."""
NOT_UTF8 = re.compile(r"[\ud800-\udfff]")
"""What Python reads for bytes that are not UTF-8."""
TRAINED = "trained"
"""Value of `SYSTEM` that means the system turn of the training rows."""
COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D ends"


class Ready(NamedTuple):
    """A loaded model, ready to answer."""

    model: Any
    tokenizer: Any
    settings: AnswerSettings


def main(call: Call) -> int:
    """Answer a prompt, a file or a conversation; input is read and checked before the model is loaded."""
    options = call.options
    _check_options(options)
    plain = plain_model(options, "infer")
    call.refuse_keys(OF_A_MODEL if plain else SETTINGS, f"a trained {'model' if plain else 'run'}")
    run = None if plain else find_run(options["RUN"])
    folder = weights_folder(run, options.get("CHECKPOINT")) if run else None
    origin = run or run_around(typed_path(plain or ""))
    rows = read_questions(Path(options["INPUT"]), _columns(origin) if origin else ()) if "INPUT" in options else None
    asked = [row.messages for row in rows if row.messages] if rows is not None else [[]]
    first = _system_turn(options.get("SYSTEM"), origin, asked)
    rows = rows and [row._replace(messages=_begun(row.messages, first)) for row in rows]
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there; stdout is for answers
        ready = _load(call, run, folder) if run and folder else _load_plain(call, plain or "")
    if "PROMPT" in options:
        facts = {"run": run.name, "weights": label_of(run, folder)} if run and folder else {"model": plain or ""}
        return _answer_prompt(call, ready, facts, first)
    if rows is not None:
        return _answer_file(call, ready, rows, Path(options["OUTPUT"]))
    if isinstance(sys.stdin, io.TextIOWrapper):  # so that other bytes are refused below in every locale
        sys.stdin.reconfigure(errors="surrogateescape")
    return Conversation(ready, as_json=call.json, first=first).run(sys.stdin or io.StringIO())


def _system_turn(typed: str | None, run: RunFolder | None, asked: Sequence[Messages]) -> Messages:
    """Return the system turn of conversations without one (`SYSTEM`), and print a note if they lack that of all
    training rows.
    """
    trained = common_system(run) if run else None
    if typed and typed != TRAINED and get_close_matches(typed.lower(), [TRAINED], cutoff=0.8):
        raise UserError(
            f"`SYSTEM={typed}` would be the text of the system turn", hint=f"did you mean SYSTEM={TRAINED}?"
        )
    if typed == TRAINED:
        if trained is None:
            raise UserError(
                f"`SYSTEM={TRAINED}` needs a run whose training rows all began with one system turn",
                hint='omit it: `data.system`, if set, is added anyway; SYSTEM="..." is the text of another',
            )
        typed = trained
    lacking = sum(_begins_without_system(messages) for messages in asked)
    if trained is not None and lacking and typed is None:
        lack = f"{lacking} of {len(asked)} prompts lack" if len(asked) > 1 else "is missing here"
        tell(f"note: {needs_system(trained)}, which {lack}; SYSTEM={TRAINED} adds it")
    return [] if typed is None else [{"role": "system", "content": typed}]


def _begins_without_system(messages: Messages) -> bool:
    return not messages or messages[0]["role"] != "system"


def _begun(messages: Messages, first: Messages) -> Messages:
    """Return a conversation after `first`, unless it is empty or has a system turn."""
    return [*first, *messages] if messages and _begins_without_system(messages) else messages


def _columns(run: RunFolder) -> list[Mapping[str, str]]:
    """Return the renamed columns of each of the run's sources."""
    from sft_play.config.load import read_config

    return [source.columns for source in read_config(run.config).config.data.sources if source.columns]


def _check_options(options: Mapping[str, str]) -> None:
    """Raise `UserError` for variables that cannot be combined, and for an `OUTPUT` that would overwrite the questions
    or lose the answers.
    """
    hint = "make infer RUN=name INPUT=questions.jsonl OUTPUT=answers.jsonl"
    if "PROMPT" in options and ("INPUT" in options or "OUTPUT" in options):
        raise UserError("`PROMPT` asks for one answer and `INPUT`/`OUTPUT` for a file of them: give one or the other")
    if not options.get("PROMPT", "?").strip():
        raise UserError("`PROMPT` is empty")
    if NOT_UTF8.search(options.get("PROMPT", "")):
        raise UserError("`PROMPT` is not UTF-8 text")
    if ("INPUT" in options) != ("OUTPUT" in options):
        present, lacking = ("INPUT", "OUTPUT") if "INPUT" in options else ("OUTPUT", "INPUT")
        raise UserError(f"`{present}` needs `{lacking}`", hint=hint)
    if "OUTPUT" in options:
        source, output = Path(options["INPUT"]), Path(options["OUTPUT"])
        if source.exists() and output.exists() and source.samefile(output):
            raise UserError(
                "`OUTPUT` is the same file as `INPUT`: the questions would be lost",
                place=str(output),
                hint="choose another OUTPUT=",
            )
        if output.suffix.lower() not in WRITERS:
            raise UserError(
                f"`OUTPUT` must end with one of: {', '.join(f'`{ending}`' for ending in WRITERS)}",
                place=str(output),
                hint=f"OUTPUT={as_typed(output.with_suffix('.jsonl'))}",
            )
        if (output.exists() and not output.is_file()) or not os.access(output.absolute().parent, os.W_OK):
            message = "`OUTPUT` cannot be written: it is no plain file, or its folder does not exist or is not writable"
            raise UserError(message, place=str(output))


def _settings(config: Config, planned_batch: int) -> AnswerSettings:
    from sft_play.evaluation.generation import AnswerSettings

    return AnswerSettings(
        max_new_tokens=config.train.generation_max_new_tokens,
        num_beams=config.train.generation_num_beams,
        batch_size=planned_batch if config.eval.batch_size == "auto" else config.eval.batch_size,
    )


def _load(call: Call, run: RunFolder, folder: Path) -> Ready:
    from sft_play.config.load import read_config
    from sft_play.model.tokenizer import continue_texts
    from sft_play.model.use import load_for_use
    from sft_play.plan.plan import Plan

    config = read_config(run.config, call.overrides).config
    settings = _settings(config, Plan.load(run.plan).eval_batch_size)
    tell(f"loading {label_of(run, folder)} of the run {run.name} ...")
    ready = Ready(*load_for_use(run, folder), settings)
    if config.tuning.task == "cpt" and continue_texts(ready.tokenizer):
        tell("note: the run learnt documents, so texts are continued as they are, without a chat template")
    return ready


def _load_plain(call: Call, name: str) -> Ready:
    from sft_play.model.use import find_plain, load_plain

    config, model = find_plain(call, name)
    tell(f"loading {name} ...")
    return Ready(*load_plain(config, model), _settings(config, BATCH_SIZE))


def _answer_prompt(call: Call, ready: Ready, facts: Mapping[str, str], first: Messages) -> int:
    from sft_play.evaluation.generation import answer_all

    prompt = call.options["PROMPT"]
    question = Question("`PROMPT`", [*first, {"role": "user", "content": prompt}])
    answer = answer_all(*ready, _prompts(ready, [question]))[0]
    if call.json:
        parts = {"prompt": prompt, **_parts(answer.parts), "tokens": answer.tokens, "stopped": answer.stopped}
        print(json.dumps({**facts, **parts}, ensure_ascii=False))
    else:
        _tell_thought(answer.parts)
        print(answer.parts.shown)
        _tell_cut([answer], ready)
    return 0


def _answer_file(call: Call, ready: Ready, rows: Sequence[Question], output: Path) -> int:
    """Answer all rows, then publish `output`; on failure an older file is unchanged."""
    from sft_play.evaluation.generation import answer_all

    asked = [row for row in rows if row.messages]
    source, ending = Path(call.options["INPUT"]), output.suffix.lower()
    alike = ending in (".csv", ".tsv") and kind(source) == ending
    write = _separated(*csv_marks(source)) if alike else WRITERS[ending]
    with bar("answering", "answers") as show:
        answers = answer_all(*ready, _prompts(ready, asked), progress=show)
    coming = iter(answers)
    output_rows = [_output_row(ready, row, next(coming).parts if row.messages else None) for row in rows]
    replaced = ", which replaces an older file" if output.exists() else ""
    try:
        write_text(output, write(output_rows))
    except OSError as error:
        raise UserError(f"`OUTPUT` cannot be written: {error.strerror}", place=str(output)) from error
    cut = _tell_cut(answers, ready)
    if call.json:
        print(json.dumps({"rows": len(rows), "output": str(output), "cut": cut}))
    else:
        empty = f", {len(rows) - len(asked)} of them to empty lines" if len(rows) > len(asked) else ""
        tell(f"{plural(len(rows), 'answer')} in {output}{empty}{replaced}")
    return 0


def _tell_cut(answers: Sequence[Answer], ready: Ready) -> int:
    """Return the number of answers that were cut at the limit, after printing a note about them."""
    cut = sum(not answer.stopped for answer in answers)
    if cut:
        limit = ready.settings.max_new_tokens
        of = (
            f"{cut} of {len(answers)} answers {'was' if cut == 1 else 'were'}" if len(answers) > 1 else "the answer was"
        )
        tell(f"note: {of} cut at {limit} tokens; TRAIN_GENERATION_MAX_NEW_TOKENS={2 * limit} allows more")
    return cut


def _parts(answer: AnswerParts) -> dict[str, Any]:
    """Return the JSON fields of an answer and of the thought before it."""
    return {"answer": answer.shown, **({"thought": answer.thought} if answer.thought else {})}


def _tell_thought(answer: AnswerParts) -> None:
    """Print an answer's thought on stderr, apart from the answer."""
    if answer.thought:
        tell(f"thought: {answer.thought}")


def _output_row(ready: Ready, row: Question, answer: AnswerParts | None) -> dict[str, Any]:
    """Return a row of `OUTPUT`: the other columns of `INPUT` (prefixed with `input.` if the name is ours), question and
    answer.

    `answer` is `None` for a row without a question.
    """
    from sft_play.data.answers import marks_of

    others = {f"input.{name}" if name in OURS else name: value for name, value in row.others.items()}
    prompt = row.messages[-1]["content"] if row.messages else ""
    output: dict[str, Any] = others | {"prompt": prompt, **(_parts(answer) if answer else {"answer": ""})}
    if row.reference is not None:
        output["reference"] = marks_of(ready.tokenizer).cut(row.reference, generated=False).shown
    return output | ({"messages": row.messages} if len(row.messages) > 1 else {})


def _json_text(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, default=str)  # a table may contain dates


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{_json_text(row)}\n" for row in rows)


def _separated(separator: str, start: str = "") -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """Return a function that writes rows as a table that begins with `start`, with lists and mappings as JSON."""

    def write(rows: Sequence[Mapping[str, Any]]) -> str:
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(
            text,
            sorted(names, key=lambda name: name in OURS and 1 + OURS.index(name)),
            delimiter=separator,
            lineterminator="\n",
        )
        writer.writeheader()
        writer.writerows(
            {name: _json_text(cell) if isinstance(cell, (list, dict)) else cell for name, cell in row.items()}
            for row in rows
        )
        return start + text.getvalue()

    return write


OURS = ("prompt", "answer", "thought", "reference", "messages")
"""Columns that `OUTPUT` adds to those of `INPUT`."""
WRITERS: dict[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    ".jsonl": _json_lines,
    ".json": lambda rows: f"{_json_text(list(rows))}\n",
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
}
"""File ending of `OUTPUT` -> function that writes its rows."""


def _prompts(ready: Ready, rows: Sequence[Question]) -> list[list[int]]:
    """Return the prompts' tokens. Raise `DataError` for rows that the template refuses or that leave no room for an
    answer.
    """
    from sft_play.evaluation.generation import context_length, prompt_ids

    room = context_length(ready.model)
    prompts: list[list[int]] = []
    problems: list[UserError] = []
    for place, messages, tools, *_ in rows:
        try:
            prompts.append(prompt_ids(ready.tokenizer, messages, tools))
        except DataError as error:
            problems.append(DataError(error.message, place=place))
            continue
        if len(prompts[-1]) >= room:
            message = f"the prompt has {len(prompts[-1])} tokens, and the model takes at most {room - 1}"
            problems.append(DataError(message, place=place))
    raise_all(problems[:20])
    return prompts


class Conversation:
    """A chat at the terminal or over a pipe: one line per turn, streamed answers, and a history that drops what no
    longer fits.
    """

    def __init__(self, ready: Ready, *, as_json: bool = False, first: Messages | None = None) -> None:
        self.model, self.tokenizer, self.settings = ready
        self.as_json, self.first = as_json, first or []
        self.messages: Messages = []

    def run(self, stdin: Any) -> int:
        """Read lines until the end or `/quit`; return the exit code."""
        interactive = stdin.isatty()
        if interactive:
            tell(COMMANDS)
        while True:
            if interactive:
                print("> ", end="", file=sys.stderr, flush=True)
            line = stdin.readline()
            if not line or line.strip() == "/quit":
                return 0
            if NOT_UTF8.search(line):
                raise UserError(
                    "a question on stdin is not UTF-8 text", hint="iconv -f LATIN1 -t UTF-8 converts a file"
                )
            if line.strip() == "/reset":
                self.messages.clear()
                tell("the conversation is cleared")
            elif line.strip().startswith("/"):
                tell(f"unknown command; {COMMANDS}")
            elif line.strip():
                self.ask(line.strip())

    def ask(self, question: str) -> None:
        """Answer a turn, stream the answer to stdout and add both to the history."""
        from sft_play.evaluation.generation import answer_all

        self.messages.append({"role": "user", "content": question})
        try:
            prompt = self._fitting_prompt()
        except DataError as error:
            self.messages.pop()
            tell(error.render())
            return
        if self.as_json or self.settings.num_beams > 1:  # beam search chooses the text only at the end
            answer = answer_all(self.model, self.tokenizer, self.settings, [prompt])[0].parts
            print(
                json.dumps({"prompt": question, **_parts(answer)}, ensure_ascii=False)
                if self.as_json
                else answer.shown,
                flush=True,
            )
        else:
            answer = self._stream(prompt)
        thought = {"reasoning_content": answer.thought} if answer.thought else {}
        self.messages.append({"role": "assistant", "content": answer.shown, **thought})

    def _stream(self, prompt: Sequence[int]) -> AnswerParts:
        """Print the answer while it is generated, without its thought, and return it."""
        import torch

        from sft_play.evaluation.generation import Stream, context_length, generation_settings, use_our_settings

        use_our_settings(self.model)
        ids = torch.tensor([list(prompt)], device=self.model.device)
        generation = generation_settings(self.tokenizer, self.settings, room=context_length(self.model) - len(prompt))
        streamer = Stream(self.tokenizer, set(generation.eos_token_id))
        with torch.no_grad():
            self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation, streamer=streamer
            )
        _tell_thought(streamer.parts)
        return streamer.parts

    def _fitting_prompt(self) -> list[int]:
        """Return the conversation's tokens, dropping its oldest exchanges until it fits with an answer."""
        from sft_play.evaluation.generation import context_length, prompt_ids

        room = context_length(self.model) - self.settings.max_new_tokens
        forgotten = 0
        prompt = prompt_ids(self.tokenizer, [*self.first, *self.messages])
        while len(prompt) > room and len(self.messages) > 2:
            del self.messages[:2]
            forgotten += 1
            prompt = prompt_ids(self.tokenizer, [*self.first, *self.messages])
        if forgotten:
            tell(f"note: the {forgotten} oldest exchanges no longer fit into the model's context")
        if len(prompt) >= context_length(self.model):
            raise DataError(
                f"this turn has {len(prompt)} tokens, and the model takes at most {context_length(self.model) - 1}"
            )
        return prompt


# The questions of `INPUT`: rows of a data file without their last answer, or a text file with one prompt per line.


ASKS = {columns[0]: (form, "".join(columns[1:])) for form, (columns, _) in FORMATS.items() if form not in NO_CHAT}
"""Column of questions -> format and column of answers; the first that a row has counts (`make infer`)."""
TO_COME = "\N{HORIZONTAL ELLIPSIS}"
"""Placeholder for the answer while a row is read as its format, which requires an answer."""


class Question(NamedTuple):
    """A line or row of `INPUT`."""

    place: str
    """`file:line`."""
    messages: list[Message]
    """The conversation up to the turn to answer; empty for an empty line."""
    tools: list[Any] | None = None
    reference: str | None = None
    """The row's own answer."""
    others: Mapping[str, Any] = {}
    """The row's other columns, copied to `OUTPUT`."""


def read_questions(path: Path, columns: Sequence[Mapping[str, str]] = ()) -> list[Question]:
    """Return the rows or lines of a file; of `columns` (`data.sources[].columns`) the first that apply rename its
    columns.

    Raise `DataError` with the places of all bad rows, and for a file without prompts.
    """
    rows: list[Question] = []
    faults = Faults()
    try:
        if kind(path) not in TABLES:
            with open_bytes(path) as stream:
                lines = stream.read().decode("utf-8-sig").removesuffix("\n").split("\n")
            for number, line in enumerate(map(str.strip, lines), 1):
                messages = [{"role": "user", "content": text_of(line, "the line")}] if line else []
                rows.append(Question(f"{path}:{number}", messages))
        for placed in read_file(path) if kind(path) in TABLES else ():
            try:
                rows.append(_question(placed, columns))
            except DataError as error:
                error.place = error.place or placed[0]
                faults.add(error)
    except OSError as error:
        raise DataError(f"`INPUT` cannot be read: {error.strerror}", place=str(path)) from error
    except UnicodeDecodeError as error:
        raise DataError("`INPUT` is not UTF-8 text", place=str(path), hint=to_utf8(str(path))) from error
    raise_all(faults.errors())
    if not any(row.messages for row in rows):
        raise DataError("`INPUT` has no prompts", place=str(path), hint="write a prompt in each row or line")
    return rows


def _question(placed: Placed, columns: Sequence[Mapping[str, str]]) -> Question:
    place, row = placed
    if isinstance(row, DataError):
        raise row
    original, old_names = row, dict[str, str]()
    for names in columns:
        there = {new: old for new, old in names.items() if "." not in new and look_up(row, old) is not MISSING}
        of_turns = {new: old for new, old in names.items() if "." in new and new.partition(".")[0] in {*row, *there}}
        if there or of_turns:
            row, old_names = rename(row, {**there, **of_turns}), there
            break
    asks = next((column for column in ASKS if row.get(column) is not None), None)
    if asks is None:
        own = [names[column] for names in columns for column in ASKS if column in names]
        expected = f"{names_of(dict.fromkeys(own))} as in the run's `columns`, or " if own else ""
        raise DataError(
            f"no column contains a prompt: expected {expected}{', '.join(f'`{c}`' for c in ASKS)};"
            f" the columns are {names_of(row)}",
            hint=f"rename the column of the prompts to `{[*own, 'prompt'][0]}`,"
            " or give a text file with one prompt a line",
        )
    form, answer = ASKS[asks]
    others = {
        name: value
        for name, value in original.items()
        if name not in {old_names.get(column_name, column_name) for column_name in (asks, answer)}
    }
    if isinstance(row[asks], str) and not row[asks].strip():
        return Question(place, [], others=others)
    row = {name: value for name, value in row.items() if part_by_name(name) != "a thought"}  # as little as the answer
    example = understand((place, _with_answer(row, asks, answer)), form)
    *asked, last = example.messages or []
    if not any(turn["role"] == "user" for turn in asked):
        raise DataError(f"`{asks}` has no turn that can be answered")
    calls = [call["function"] for call in last.get("tool_calls", ())]
    reference = "\n".join(
        filter(None, [last["content"], *(call_text(call["name"], call["arguments"]) for call in calls)])
    )
    messages = [{key: value for key, value in turn.items() if key != "train"} for turn in asked]
    return Question(place, messages, example.tools, None if reference == TO_COME else reference, others)


def _with_answer(row: Mapping[str, Any], asks: str, answer: str) -> Mapping[str, Any]:
    """Return a row that ends with its own answer, or `TO_COME` if it is missing or empty."""
    question = row[asks]
    if not answer:
        return {
            **row,
            asks: _with_last_answer(
                question, asks, *(("role", "content") if asks == "messages" else ("from", "value"))
            ),
        }
    reference = row.get(answer)
    if not isinstance(reference, str) and reference:
        return {**row, answer: _with_last_answer(reference, answer, "role", "content")}
    if isinstance(reference, str) and reference.strip():
        return row
    return {
        **row,
        answer: TO_COME
        if isinstance(question, str) or asks != "prompt"
        else [{"role": "assistant", "content": TO_COME}],
    }


def _with_last_answer(turns: Any, column: str, name: str, words: str) -> Any:
    """Return turns that end with a non-empty assistant turn."""
    turns = list_of(turns, column)
    if not turns or not isinstance(last := turns[-1], Mapping):
        return turns
    if ROLE_NAMES.get(str(last.get(name, last.get("role"))).lower()) not in ("assistant", CALLS):
        return [*turns, {name: "assistant", words: TO_COME}]
    content = last.get(words)
    empty = not (content.strip() if isinstance(content, str) else content) and not last.get("tool_calls")
    return [*turns[:-1], {**last, words: TO_COME}] if empty else turns
