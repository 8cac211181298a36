"""What the user asked for: a command, its options, its overrides, and the configuration it is about; `make config` and
`--help`.

make hands its variables over in `MAKEFLAGS` (see `docs/adr/0003-make-variables.md`), so neither make nor a shell
expands a value. Nothing that was typed is ever ignored: a name that no key and no option knows is an error with a
suggestion.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sft_play.config import names
from sft_play.config.keys import find_key, sections, variable_name, variables
from sft_play.config.layers import Override, config_path, explain_mismatch, preset_path
from sft_play.config.load import LoadedConfig, load_config, override_config, read_config
from sft_play.config.names import VARIABLES
from sft_play.config.yaml_files import is_writable, scalar_text
from sft_play.errors import HardwareError, UserError, mask, raise_all, without_secret
from sft_play.files import is_file_name
from sft_play.runs.folder import RunFolder, give_consent, run_path, runs_folder
from sft_play.runs.gate import check_run
from sft_play.runs.origin import has_unsloth

LARGEST_PORT = 65_535
TRUE, FALSE = frozenset({"1", "true", "yes"}), frozenset({"", "0", "false", "no"})


NO_UNSLOTH = "the package `unsloth`"
UNSLOTH_HINT = "`make install-unsloth` installs it, into an environment of its own; `tuning.backend: bnb` needs none"
WITHOUT_UNSLOTH = ("kubernetes", "train-cluster", "cluster-check", "cluster-install")
"""Commands that start images or environments which do not hold it."""
TRAINING = ("resume", "profile", "bench", "soak", "sweep")
"""Commands that train, beside `train` and its kin."""


class OtherEnvironment(Exception):
    """The environment in which the whole command is to run again."""

    def __init__(self, python: Path) -> None:
        super().__init__(str(python))
        self.python = python


def enter_unsloth(command: str) -> None:
    """Have a command run in the environment of `make install-unsloth`: Unsloth wants older versions of transformers and
    datasets.

    It lies beside this one, whose name it bears: `.venv-unsloth`. Raise `OtherEnvironment`; `UserError` for a command
    that starts others, and `HardwareError` for a training where there is none.
    """
    if command in WITHOUT_UNSLOTH:
        raise UserError(
            f"`tuning.backend` is `unsloth`, and `{command}` starts environments without it",
            hint="`tuning.backend: bnb`; or type make train-distributed on each machine, or make slurm, with NUM_NODES",
        )
    python = Path(f"{sys.prefix}-unsloth", "bin", "python")
    if has_unsloth():
        return
    if python.is_file():
        raise OtherEnvironment(python)
    if command.startswith("train") or command in TRAINING:
        raise HardwareError(f"`tuning.backend: unsloth` needs {NO_UNSLOTH}", hint=UNSLOTH_HINT)


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the table of commands: where the code is, what the user reads in `make help`, which variables it
    takes.
    """

    target: str
    """`module:function`; the function takes a `Call` and returns an exit code."""
    help: str
    takes: str = ""
    """The names of its variables, with spaces between."""
    overrides: bool = True
    """Whether `SECTION_KEY=value` is accepted."""

    @property
    def options(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(self.takes.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A command with everything that came with it."""

    command: str
    options: Mapping[str, str] = field(default_factory=dict)
    """`CONFIG`, `RUN`, `NUM_GPUS`, ...: only those that the command takes."""
    overrides: tuple[Override, ...] = ()
    json: bool = False
    """Whether machine-readable output is wanted on stdout."""
    trusts_code: bool = False
    """Whether MODEL_TRUST_REMOTE_CODE=true was typed with `RUN`: this user lets the code of the run's base model run.
    """

    def load_config(self, default: str | None = None) -> LoadedConfig:
        """Return the configuration of `CONFIG` (else of `RUN`, else of `default`) with the overrides; prints notices to
        stderr.

        Raise `UserError` with every problem at once.
        """
        run = self.options.get("RUN")
        if run and self.options.get("CONFIG"):
            raise UserError(
                "`CONFIG` and `RUN` are both given",
                hint="a run keeps the configuration that it was started with; give one of them",
            )
        if not run:
            name = self.options.get("CONFIG") or default
            if not name:
                raise UserError(
                    f"`{self.command}` needs a configuration", hint="CONFIG=my.yaml, or a preset: CONFIG=quickstart"
                )
            loaded = load_config(config_path(name), self.overrides)
        else:
            folder = run_path(run) or (Path(run) if Path(run).is_dir() else runs_folder() / run)
            saved = read_config(check_run(RunFolder(folder)).config)
            loaded = override_config(saved, self.overrides)
        # A run of the other backend is refused by its stamp, which needs no second environment.
        if loaded.config.tuning.backend == "unsloth" and not (run and saved.config.tuning.backend != "unsloth"):
            enter_unsloth(self.command)
        for notice in loaded.notices:
            print(f"note: {notice}", file=sys.stderr)
        note_consent(loaded)
        return loaded

    def port(self, name: str) -> int | None:
        """Return a port, `None` when it was not given. Raise `UserError`."""
        port = self.integer(name, minimum=1)
        if port is not None and port > LARGEST_PORT:
            raise UserError(f"`{name}` is `{port}`; expected a port, 1 to {LARGEST_PORT}")
        return port

    def flag(self, name: str) -> bool:
        """Return whether an option is switched on. Raise `UserError`."""
        text = self.options.get(name, "").lower()
        if text not in TRUE | FALSE:
            raise UserError(f"`{name}` is `{self.options[name]}`; expected `1` or `0`")
        return text in TRUE

    def integer(self, name: str, minimum: int = 0) -> int | None:
        """Return a whole-number option, `None` when it was not given. Raise `UserError`."""
        text = self.options.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or int(text) < minimum:
            raise UserError(f"`{name}` is `{text}`; expected an integer >= {minimum}")
        return int(text)


def note_consent(loaded: LoadedConfig) -> None:
    """Notes what code the user lets run: by the words of this command, or in a YAML of theirs."""
    if loaded.config.model.trust_remote_code and "model.trust_remote_code" not in loaded.of_run:
        give_consent("model")
    if "eval.metrics" not in loaded.of_run:
        give_consent("metrics")


# `make config`: the resolved configuration as YAML, each key with where its value came from.


COLUMN = 44
"""Where origins begin, when the value leaves room."""


def show(call: Call) -> int:
    """Print the configuration and return 0."""
    loaded = call.load_config()
    flat = flatten(loaded)
    if call.json:
        print(
            json.dumps({key: {"value": value, "origin": loaded.origins[key]} for key, value in flat.items()}, indent=2)
        )
    else:
        print(as_yaml(flat, loaded.origins))
    return 0


def flatten(loaded: LoadedConfig) -> dict[str, Any]:
    """Return dotted key -> plain value, in the schema's order; further `TrainingArguments` stand behind the schema's
    own.
    """
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        for item in dataclasses.fields(value):
            key, inner = f"{name}.{item.name}" if name else item.name, getattr(value, item.name)
            if key == "train.extra":
                flat.update({f"train.{field}": _plain(part) for field, part in inner.items()})
            elif dataclasses.is_dataclass(inner):
                walk(inner, key)
            else:
                flat[key] = _plain(inner)

    walk(loaded.config, "")
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
    return dict(value) if isinstance(value, Mapping) else value


def as_yaml(flat: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return block YAML that can be saved and used again; origins are comments."""
    lines: list[str] = []
    opened: set[str] = set()
    for key, value in flat.items():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if (head := ".".join(sections[: depth + 1])) not in opened:
                opened.add(head)
                lines.append("  " * depth + f"{section}:")
        text = "  " * len(sections) + f"{name}: {scalar_text(value)}"
        lines.append(f"{text:<{COLUMN}}  # {_comment(origins[key])}")
    return "\n".join(lines)


def _comment(origin: str) -> str:
    """A comment ends at the line's end, whatever was typed."""
    return origin if origin.isprintable() else origin.encode("unicode_escape").decode("ascii")


# `sft-play COMMAND --help`.


def command_help(name: str, row: Command) -> str:
    """Return what `sft-play NAME --help` prints."""
    taken = [option for option in VARIABLES if option in row.options]
    lines = [f"sft-play {name} NAME=value ...", "", f"  {row.help}", ""]
    width = max(map(len, [*taken, "SECTION_KEY"])) + 2
    lines += [f"  {option:<{width}}{VARIABLES[option]}" for option in taken]
    if row.overrides:
        lines.append(
            f"  {'SECTION_KEY':<{width}}any key of docs/configuration.md: `TRAIN_BATCH_SIZE=1` is `train.batch_size: 1`"
        )
    return "\n".join(lines if taken or row.overrides else [*lines, "  it takes no variables"])


FOR_MAKE = frozenset({"PYTHON", "VENV"})
"""Variables that make itself uses."""
STANDS_FOR = {
    "MODEL": "MODEL_NAME",
    "DATA": "DATA_TRAIN_PATH",
    "SEED": "TRAIN_SEED",
    "STRATEGY": "LAUNCH_STRATEGY",
    "RANK": "NODE_RANK",
}
"""Variables of some commands that elsewhere mean a key or another variable."""
NUMBERS = frozenset({"NUM_GPUS", "NUM_NODES", "NODE_RANK", "MASTER_PORT"})
SINGLE = frozenset({"train", "train-tb"})
"""Commands of one process."""
FOR_SEVERAL = (
    ("LAUNCH_STRATEGY=zero", "train-deepspeed"),
    ("LAUNCH_STRATEGY=fsdp2", "train-fsdp"),
    ("LAUNCH_STRATEGY=ddp", "train-distributed"),
    ("NUM_NODES=", "train-distributed"),
    ("NUM_GPUS=", "train-distributed"),
    ("NODE_RANK=", "train-distributed"),
)
"""How settings begin that need several processes -> the command of such a run."""
COUNTED_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("world_size", "num_processes", "ntasks"),
        "It counts the processes of one machine, and `NUM_NODES` the machines",
    ),
    **dict.fromkeys(("rank", "local_rank"), "It counts machines, from 0: a command starts all processes of a machine"),
}
"""What launchers count over all machines -> what the variable here counts."""
LONG = frozenset({"PROMPT", "SEARCH", "RUNS", "BENCHMARKS", "HARDWARE", "WHERE"})
"""Options that are neither a number, a name nor a single path."""


@dataclass(frozen=True, slots=True)
class _Given:
    """One `NAME=value`."""

    name: str
    text: str
    make: bool

    @property
    def origin(self) -> str:
        return without_secret(f"{'make ' if self.make else ''}{self.name}={self.text}", self.name)


def parse_call(
    arguments: Sequence[str],
    commands: Mapping[str, Command],
    environ: Mapping[str, str] | None = None,
    targets: Iterable[str] = (),
) -> Call:
    """Return the call that `arguments` (without the program's name) describe; `targets`: those of the Makefile that are
    no commands.

    Raise `UserError` with all problems.
    """
    environ = os.environ if environ is None else environ
    from_make = "--from-make" in arguments
    words = [word for word in arguments if word != "--from-make"]
    command = _command(words, commands, targets if from_make else None)
    problems: list[UserError] = []
    given = (
        [_Given(name, text, make=True) for name, text in make_variables(environ.get("MAKEFLAGS", ""))]
        if from_make
        else []
    )
    given = [one for one in given if one.name not in FOR_MAKE]
    given += _typed(words[1:], commands, problems)
    options: dict[str, str] = {}
    overrides: dict[str, Override] = {}
    known = frozenset(option for row in commands.values() for option in row.options)
    of_run, trusts_code = any(one.name == "RUN" for one in given) and "RUN" in commands[command].options, False
    for one in given:
        key = _key(one)
        if not is_writable(one.name + one.text):
            problems.append(UserError(f"`{ascii(one.name)[1:-1]}` is not UTF-8 text"))
        elif one.name in known or _of_cluster(one.name, commands[command]):
            _option(one, command, commands, options, problems)
        elif key == "model.trust_remote_code" and one.text.lower() in TRUE and of_run:
            trusts_code = True  # the run keeps its configuration; what the user says is said of this command
        elif key is None:
            problems.append(_unknown(one, known, command, commands))
        elif not commands[command].overrides:
            takers = (
                "it takes " + _listed(commands[command].options)
                if commands[command].options
                else "it takes no variables"
            )
            problems.append(
                UserError(f"`{one.origin}`: `{_shown(command, one)}` takes no configuration keys", hint=takers)
            )
        elif key in overrides and overrides[key].text != one.text:
            problems.append(
                UserError(f"`{key}` is given twice: `{overrides[key].origin}` and `{one.origin}`", hint="give it once")
            )
        else:
            overrides[key] = Override(key=key, text=one.text, origin=one.origin)
    problems += _in_environment(command, commands[command], {one.name for one in given}, environ, make=from_make)
    as_json = options.get("JSON", "").lower()
    if as_json not in TRUE | FALSE:
        problems.append(UserError(f"`JSON` is `{options['JSON']}`; expected `1` or `0`"))
    raise_all(problems)
    return Call(
        command=command,
        options=options,
        overrides=tuple(overrides.values()),
        json=as_json in TRUE,
        trusts_code=trusts_code,
    )


def _in_environment(
    command: str, row: Command, typed: Collection[str], environ: Mapping[str, str], *, make: bool
) -> Iterator[UserError]:
    """Yield what is wrong where the environment holds an option that was not typed: `NUM_NODES=2 make
    train-distributed`, `SFT_NUM_NODES`.
    """
    taken = [
        *(option for option in VARIABLES if option in row.options),
        *sorted(name for name in environ if _of_cluster(name, row)),
    ]
    found = [
        (name, option)
        for option in taken
        if option not in typed
        for name in (option, f"SFT_{option}")
        if environ.get(name, "").strip()
    ]
    if found:
        words = [f"{option}={mask(option, shlex.quote(environ[name]))}" for name, option in found]
        names = [name for name, _ in found]
        shown = f"{'make ' if make else ''}{command}"
        yield UserError(
            f"{_listed(names)} {'is' if len(names) == 1 else 'are'} in the environment, and options are read after the command only",
            place="environment",
            hint=f"type `{shown} {' '.join(words)} ...`; what is not meant: `unset {' '.join(names)}`",
        )


def make_variables(flags: str) -> Iterator[tuple[str, str]]:
    """Yield the variables typed to GNU make, from the `MAKEFLAGS` that a recipe sees: after ` -- `, `$` doubled, blanks
    escaped.

    Raise `UserError` for the `MAKEFLAGS` of `make -e`, in which GNU make 4.3 leaves a reference instead of the
    variables.
    """
    escaped = _split(flags)
    if "--" not in escaped:
        return
    for word in escaped[escaped.index("--") + 1 :]:
        if word == "$(MAKEOVERRIDES)":
            raise UserError("`make -e` hides the variables that you typed", hint="omit `-e`")
        name, equals, text = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$").partition("=")
        if equals:
            yield name.rstrip(":"), text


def _split(flags: str) -> list[str]:
    """Cut at spaces that no backslash escapes; a newline in a value is not a cut."""
    words = [""]
    skip = False
    for letter in flags:
        if letter == " " and not skip:
            words.append("")
        else:
            words[-1] += letter
        skip = letter == "\\" and not skip
    return [word for word in words if word]


def _command(words: list[str], commands: Mapping[str, Command], targets: Iterable[str] | None) -> str:
    name = words[0] if words else "help"
    if name in ("-h", "--help") and "help" in commands:
        return "help"
    if name in commands:
        return name
    if name.startswith("-") or "=" in name:
        raise UserError(f"expected a command, not `{name}`", hint="sft-play COMMAND NAME=value ...")
    if name in (targets or ()):
        raise UserError(
            f"`make {name}` works in a clone only", hint="`make help` lists the commands that work here too"
        )
    if removed := names.REMOVED.get(name):
        raise UserError(f"`{name}` is not a command any more", hint=removed)
    close = get_close_matches(name.replace("_", "-"), [*commands, *(targets or ())], n=1, cutoff=0.6)
    raise UserError(
        f"`{name}` is not a command" if targets is None else f"there is no target `{name}`",
        hint=(
            f"did you mean `{'' if targets is None else 'make '}{close[0]}`?"
            if close
            else f"`{'sft-play' if targets is None else 'make'} help` lists all commands"
        ),
    )


def _typed(words: Sequence[str], commands: Mapping[str, Command], problems: list[UserError]) -> list[_Given]:
    """Return the assignments of a direct command line; `--section.key value` takes the next word."""
    found: list[_Given] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            flag = name[2:]
            if not equals and find_key(flag) is not None:
                if not rest:
                    problems.append(UserError(f"`{word}` has no value"))
                    continue
                text = rest.pop(0)
            elif not equals and rest and "=" not in rest[0] and not rest[0].startswith("--"):
                text = rest.pop(0)
            found.append(_Given(flag if find_key(flag) else name, text, make=False))
        elif equals:
            found.append(_Given(name, text, make=False))
        else:
            known = [option for row in commands.values() for option in row.options]
            better = names.suggest(word, options=known)
            hint = (
                f"did you mean `{variable_name(better)}=...`?"
                if better
                else "everything after the command is `NAME=value`"
            )
            if word.endswith((".yaml", ".yml")) or preset_path(word).is_file():
                hint = f"did you mean `CONFIG={word}`?"
            problems.append(UserError(f"`{word}` is not `NAME=value`", hint=hint))
    return found


def _key(one: _Given) -> str | None:
    """Return the dotted key that was meant, exactly; make takes variables only."""
    if not one.make and find_key(one.name) is not None:
        return one.name
    if not one.make and names.refusal(one.name):
        return one.name
    return variables().get(one.name)


def _of_cluster(name: str, row: Command) -> bool:
    """Whether a variable changes the inventory of `CLUSTER=`, as `cluster.inventory` decides: `CLUSTER_NETWORK`,
    `CLUSTER_LAPTOP_GPUS`.
    """
    return name.startswith("CLUSTER_") and "CLUSTER" in row.options


def _option(
    one: _Given, command: str, commands: Mapping[str, Command], options: dict[str, str], problems: list[UserError]
) -> None:
    if one.name not in commands[command].options and not _of_cluster(one.name, commands[command]):
        where = f"it is for {_takers(one, one.name, commands)}"
        if other := next((name for name in (f"{one.name}S", one.name[:-1]) if name in commands[command].options), None):
            where = f"did you mean `{other}={one.text}`?"
        elif commands[command].overrides and (meant := names.settings(one.name, one.text)):
            where = f"here that is {_words(meant, command, one)}"
        elif better := _stands_for(one.name, commands[command]):
            where = _did_you_mean(one, better, command)
        problems.append(UserError(f"`{_shown(command, one)}` takes no `{one.name}`", hint=where))
    elif options.get(one.name, one.text) != one.text:
        problems.append(
            UserError(f"`{one.name}` is given twice: `{options[one.name]}` and `{one.text}`", hint="give it once")
        )
    elif not one.text.strip() and one.name not in ("JSON", "PROMPT"):
        problems.append(UserError(f"`{one.name}` is empty", hint=f"give it a value, or omit `{one.name}=`"))
    elif one.name not in LONG and not is_file_name(one.text):
        problems.append(UserError(f"`{one.name}` has {len(one.text)} characters, more than any file or name may have"))
    else:
        options[one.name] = one.text


def _stands_for(option: str, row: Command) -> str | None:
    """Return the key or option that another command's option means to this one."""
    better = STANDS_FOR.get(option, "")
    return better if better in row.options else variables().get(better) if row.overrides else None


def _takers(one: _Given, option: str, commands: Mapping[str, Command]) -> str:
    return ", ".join(f"`{_prefix(one)}{name}`" for name, row in commands.items() if option in row.options)


def _unknown(one: _Given, known: frozenset[str], command: str, commands: Mapping[str, Command]) -> UserError:
    if one.name == "MASTER_KEY":
        hint = "export MASTER_KEY=$(openssl rand -hex 32), and the same value on every node"
        return UserError(
            "`MASTER_KEY` is read from the environment only: every user of a machine sees its command lines", hint=hint
        )
    if one.make and int(os.environ.get("MAKELEVEL") or 1) > 1:
        hint = (
            "make hands on what was typed to an outer make: put `MAKEOVERRIDES =` into that Makefile, and type what is"
            " meant for this one"
        )
        return UserError(f"unknown variable `{one.name}`, perhaps of another make", hint=hint)
    return UserError(f"unknown variable `{one.name}`", hint=_hint(one, known, command, commands))


def _hint(one: _Given, known: frozenset[str], command: str, commands: Mapping[str, Command]) -> str:
    """Return what to type instead of an unknown variable."""
    row = commands[command]

    def say(meant: Mapping[str, str]) -> str:
        other = next((name for name in meant if name.isupper() and name not in row.options), None)
        return f"`{other}`, for {_takers(one, other, commands)}" if other else _words(meant, command, one)

    if hint := names.hint_elsewhere(one.name, one.text, say):
        return hint
    if names.OF_PROGRAMS.fullmatch(one.name) and one.name.lower() not in names.ALIASES:
        return f"it is read from the environment: `export {one.name}={mask(one.name, one.text)}`"
    better = names.suggest(
        one.name, options=known if "RANK" in row.options else known - {"RANK"}
    )  # elsewhere it is `NODE_RANK`
    if better in known - row.options:
        key = _stands_for(better, row)
        return (
            _did_you_mean(one, key, command)
            if key
            else f"did you mean `{better}`? It is for {_takers(one, better, commands)}"
        )
    if better:
        return _did_you_mean(one, better, command)
    section = one.name.lower().partition("_")[0].partition(".")[0].lstrip("-")
    if section in sections():
        return f"`docs/configuration.md` lists the keys of `{section}`"
    takes = [_listed(row.options)] if row.options else []
    takes += ["`SECTION_KEY` for each key in `docs/configuration.md`"] if row.overrides else []
    return f"`{_shown(command, one)}` takes {', and '.join(takes) or 'no variables'}"


def _words(meant: Mapping[str, str], command: str, one: _Given) -> str:
    """Return what to type, with the command that takes it where the one that was typed starts a single process."""
    typed = " ".join(f"{variable_name(name)}={value}" for name, value in meant.items())
    several = next((other for start, other in FOR_SEVERAL if f" {typed}".find(f" {start}") >= 0), None)
    if command not in SINGLE or several is None or typed in (f"NUM_GPUS={few}" for few in ("1", "...")):
        return f"`{typed}`"
    return f"`{_prefix(one)}{command.replace('train', several)} {typed}`"


def _did_you_mean(one: _Given, better: str, command: str) -> str:
    """Return the suggestion of a key or an option, with the value that was typed where it can be one of its values."""
    key, value, takes = find_key(better), one.text or ("1" if better == "JSON" else ""), ""
    if key is not None:
        if one.name.startswith("--") and not value and not explain_mismatch(key, "true"):
            value = "true"
        takes = explain_mismatch(key, value)
    elif not value or not value.isprintable() or (better in NUMBERS and not value.strip().isdecimal()):
        takes = "a number" if better in NUMBERS else "text"
    more = f"It takes {takes}" if takes else COUNTED_HERE.get(names.plain_word(one.name), "")
    return f"did you mean {_words({better: '...' if takes else value}, command, one)}? {more}".rstrip()


def _listed(options: Collection[str]) -> str:
    return ", ".join(f"`{option}`" for option in sorted(options))


def _prefix(one: _Given) -> str:
    return "make " if one.make else ""


def _shown(command: str, one: _Given) -> str:
    return f"{_prefix(one)}{command}"
