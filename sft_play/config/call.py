"""Parse a command line into a command, its options, its overrides and the configuration that it is about; `make config`
and `--help`.

make passes its variables in `MAKEFLAGS` (see `docs/adr/0003-make-variables.md`), so neither make nor a shell expands a
value. Nothing that was typed is ignored: a name that is neither a key nor an option is an error with a suggestion.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from sft_play.config import names
from sft_play.config.keys import find_key, sections, variable_name, variables
from sft_play.config.layers import Override, config_path, preset_path
from sft_play.config.load import LoadedConfig, flatten, load_config, modes_with, override_config, read_config
from sft_play.config.names import OWN_VARIABLES, VARIABLES
from sft_play.config.reader import Range, meant_number
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import HardwareError, UserError, mask, raise_all, without_secret
from sft_play.runs.adapters import settle_parents
from sft_play.runs.folder import RunFolder, give_consent, run_path, runs_folder
from sft_play.runs.gate import check_run
from sft_play.runs.origin import UNSLOTH_HINT, has_unsloth
from sft_play.text import as_typed, list_some, tell

LARGEST_PORT = 65_535
MOST_TAKERS = 4
"""Most commands that an error names as those that take a variable."""
TRUE, FALSE = frozenset({"1", "true", "yes"}), frozenset({"", "0", "false", "no"})
WITHOUT_UNSLOTH = ("kubernetes", "train-cluster", "cluster-check")
"""Commands that start images or environments without Unsloth."""
TRAINING = ("quickstart", "resume", "profile", "bench", "sweep", "slurm")
"""Commands that train or submit a training, in addition to `train` and its variants."""


class OtherEnvironment(Exception):
    """Names the environment in which the complete command has to run again."""

    def __init__(self, python: Path) -> None:
        super().__init__(str(python))
        self.python = python


def enter_unsloth(command: str) -> None:
    """Run a command in the environment of `make install-unsloth`, since Unsloth needs older versions of transformers
    and datasets.

    That environment is next to this one and named after it: `.venv-unsloth`. Raise `OtherEnvironment`, `UserError` for
    a command that starts other environments, and `HardwareError` for a training where none is installed.
    """
    if command in WITHOUT_UNSLOTH:
        raise UserError(
            f"`tuning.backend` is `unsloth`, and `{command}` starts other environments, which lack Unsloth",
            hint=(
                "set `tuning.backend: bnb`, or use `make train-distributed` on each machine or `make slurm`,"
                " with NUM_NODES"
            ),
        )
    python = Path(f"{sys.prefix}-unsloth", "bin", "python")
    if has_unsloth():
        return
    if python.is_file():
        raise OtherEnvironment(python)
    if command.startswith("train") or command in TRAINING:
        raise HardwareError("`tuning.backend: unsloth` needs the package `unsloth`", hint=UNSLOTH_HINT)


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table of commands: its code, its line in `make help` and the variables that it takes."""

    target: str
    """`module:function`; the function takes a `Call` and returns an exit code."""
    help: str
    takes: str = ""
    """The names of its variables, separated by spaces."""
    overrides: bool = True
    """Whether `SECTION_KEY=value` is accepted."""

    @property
    def options(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(self.takes.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A command with its options and overrides."""

    command: str
    options: Mapping[str, str] = field(default_factory=dict)
    """`CONFIG`, `RUN`, `NUM_GPUS`, ...: only those that the command takes."""
    overrides: tuple[Override, ...] = ()
    json: bool = False
    """Whether stdout must be machine-readable."""
    trusts_code: bool = False
    """Whether MODEL_TRUST_REMOTE_CODE=true was typed with `RUN`: this user lets the code of the run's base model run.
    """

    def load_config(self) -> LoadedConfig:
        """Return the configuration of `CONFIG` (else of `RUN`) with the overrides, and print its notices to
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
            name = self.options.get("CONFIG")
            if not name:
                raise UserError(
                    f"`{self.command}` needs a configuration", hint="CONFIG=my.yaml, or a preset: CONFIG=quickstart"
                )
            loaded = settle_parents(load_config(config_path(name), self.overrides))
        else:
            folder = run_path(run) or (Path(run) if Path(run).is_dir() else runs_folder() / run)
            saved = read_config(check_run(RunFolder(folder)).config)
            loaded = override_config(saved, self.overrides)
        # A run of the other backend is refused by its stamp, which needs no second environment.
        if loaded.config.tuning.backend == "unsloth" and not (run and saved.config.tuning.backend != "unsloth"):
            enter_unsloth(self.command)
        for notice in loaded.notices:
            tell(f"note: {notice}")
        note_consent(loaded)
        return loaded

    def refuse_keys(self, allowed: frozenset[str], owner: str) -> None:
        """Raise `UserError` for overrides of other keys than `allowed`."""
        if refused := sorted({override.key for override in self.overrides} - allowed):
            keys = ", ".join(f"`{key}`" for key in refused)
            raise UserError(
                f"`make {self.command}` cannot change {keys} of {owner}",
                hint=f"it takes {', '.join(sorted(map(variable_name, allowed)))}",
            )

    def show(self, facts: Any, *lines: str) -> int:
        """Print facts as JSON or lines for people, and return 0."""
        print(json.dumps(facts, indent=2) if self.json else "\n".join(lines), flush=True)
        return 0

    def with_defaults(self, values: Mapping[str, str]) -> Call:
        """Return the call with these values for keys that were not typed."""
        typed, origin = {override.key for override in self.overrides}, f"make {self.command}"
        ours = (Override(key=key, text=text, origin=origin) for key, text in values.items() if key not in typed)
        return dataclasses.replace(self, overrides=(*ours, *self.overrides))

    def configuration_words(self) -> list[str]:
        """Return the typed words that choose the configuration, for commands with another target or further keys."""
        words = [f"{name}={self.options[name]}" for name in ("CONFIG", "NUM_GPUS") if self.options.get(name)]
        words += [override.origin.removeprefix("make ") for override in self.overrides]
        return [as_typed(word) for word in words] if "CONFIG" in self.options else []

    def port(self, name: str) -> int | None:
        """Return a port, or `None` if it was not typed. Raise `UserError`."""
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
        """Return an integer option, or `None` if it was not typed. Raise `UserError`."""
        text = self.options.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or int(text) < minimum:
            hint = meant_number(text, Annotated[int, Range(minimum=minimum)])
            raise UserError(f"`{name}` is `{text}`; expected an integer >= {minimum}", hint=hint)
        return int(text)


def note_consent(loaded: LoadedConfig) -> None:
    """Record which code the user allows to run, by this command's words or in their own YAML file."""
    if loaded.config.model.trust_remote_code and "model.trust_remote_code" not in loaded.of_run:
        give_consent("model")
    if "eval.metrics" not in loaded.of_run:
        give_consent("metrics")


# `make config`: the resolved configuration as YAML, each key with the origin of its value.


COLUMN = 44
"""Column where origins begin, unless the value is longer."""


def show(call: Call) -> int:
    """Print the configuration and return 0."""
    loaded = call.load_config()
    flat, mode = flatten(loaded), loaded.config.tuning.mode
    used = {key: value for key, value in flat.items() if mode in (modes_with(key) or (mode,))}
    facts = {key: {"value": value, "origin": loaded.origins[key]} for key, value in flat.items()}
    return call.show(facts, as_yaml(used, loaded.origins))


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
    """Return an origin that cannot end its comment, whatever was typed."""
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
"""Variables that make itself reads."""
STANDS_FOR = {
    "MODEL": "model.name",
    "DATA": "data.train_path",
    "SEED": "train.seed",
    "STRATEGY": "launch.strategy",
    "RANK": "NODE_RANK",
    "RUN": "RUNS RUN_NAME",
    "RUNS": "RUN RUN_NAME",
    "RUN_NAME": "RUN RUNS",
}
"""Variables that only some commands take -> the keys or variables that others take instead, the nearest first."""


@dataclass(frozen=True, slots=True)
class _Word:
    """One `NAME=value`."""

    name: str
    text: str
    make: bool

    @property
    def origin(self) -> str:
        return without_secret(f"{'make ' if self.make else ''}{self.name}={self.text}", self.name)

    def key(self) -> str | None:
        """Return the dotted key that the name spells exactly; make takes variables only."""
        dotted = not self.make and (find_key(self.name) or names.refusal(self.name))
        return self.name if dotted else variables().get(self.name)


def parse_call(
    arguments: Sequence[str],
    commands: Mapping[str, Command],
    environ: Mapping[str, str] | None = None,
    targets: Iterable[str] = (),
) -> Call:
    """Return the call that `arguments` (without the program's name) describe; `targets` are the Makefile's targets that
    are not commands.

    Raise `UserError` with all problems.
    """
    environ = os.environ if environ is None else environ
    make, arguments = "--from-make" in arguments, [word for word in arguments if word != "--from-make"]
    command = _command(arguments, commands, targets if make else None)
    parser = _Parser(command, commands, "make " if make else "")
    words = (
        [_Word(name, text, make=True) for name, text in make_variables(environ.get("MAKEFLAGS", ""))] if make else []
    )
    words = [word for word in words if word.name not in FOR_MAKE] + parser.assignments(arguments[1:])
    parser.of_run = "RUN" in commands[command].options and any(word.name == "RUN" for word in words)
    for word in words:
        parser.take(word)
    parser.refuse_untyped(environ)
    if (text := parser.options.get("JSON", "")).lower() not in TRUE | FALSE:
        parser.problems.append(UserError(f"`JSON` is `{text}`; expected `1` or `0`"))
    raise_all(parser.problems)
    return Call(
        command=command,
        options=parser.options,
        overrides=tuple(parser.overrides.values()),
        json=text.lower() in TRUE,
        trusts_code=parser.trusts_code,
    )


def make_variables(flags: str) -> Iterator[tuple[str, str]]:
    """Yield the variables typed to GNU make, read from a recipe's `MAKEFLAGS`: after ` -- `, `$` doubled, blanks
    escaped.

    Raise `UserError` for the `MAKEFLAGS` of `make -e`, where GNU make 4.3 puts a reference instead of the variables.
    """
    words = re.findall(r"(?:\\.|[^ \\])+", flags, flags=re.DOTALL)
    for word in words[words.index("--") + 1 :] if "--" in words else ():
        if word == "$(MAKEOVERRIDES)":
            raise UserError("`make -e` hides the variables that you typed", hint="omit `-e`")
        name, equals, text = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$").partition("=")
        if equals:
            yield name.rstrip(":"), text


def _command(words: Sequence[str], commands: Mapping[str, Command], targets: Iterable[str] | None) -> str:
    """Return the command that the first word names; `targets` is `None` unless make was called."""
    name = words[0] if words else "help"
    if name in ("-h", "--help") and "help" in commands:
        return "help"
    if name in commands:
        return name
    if name.startswith("-") or "=" in name:
        raise UserError(f"expected a command, not `{name}`", hint="sft-play COMMAND NAME=value ...")
    if name in (targets or ()):
        hint = "`make help` lists the commands that work here too"
        raise UserError(f"`make {name}` works in a clone only", hint=hint)
    if removed := names.REMOVED.get(name):
        raise UserError(f"`{name}` is no longer a command", hint=removed)
    program, make = ("sft-play", "") if targets is None else ("make", "make ")
    close = get_close_matches(name.replace("_", "-"), [*commands, *(targets or ())], n=1, cutoff=0.6)
    raise UserError(
        f"there is no target `{name}`" if make else f"`{name}` is not a command",
        hint=f"did you mean `{make}{close[0]}`?" if close else f"`{program} help` lists all commands",
    )


@dataclass(slots=True)
class _Parser:
    """Sorts a command's words into options and overrides and collects the problems of the others."""

    command: str
    commands: Mapping[str, Command]
    make: str
    """What the user types before a command: `make ` or nothing."""
    of_run: bool = False
    """Whether `RUN` names an existing run."""
    options: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Override] = field(default_factory=dict)
    trusts_code: bool = False
    problems: list[UserError] = field(default_factory=list)

    @property
    def row(self) -> Command:
        return self.commands[self.command]

    @property
    def known(self) -> frozenset[str]:
        """The options of all commands."""
        return frozenset(option for row in self.commands.values() for option in row.options)

    def assignments(self, words: Sequence[str]) -> list[_Word]:
        """Return the assignments of a direct command line; `--section.key value` takes the next word."""
        assignments, rest = list[_Word](), list(words)
        while rest:
            word = rest.pop(0)
            name, equals, text = word.partition("=")
            flag = name.removeprefix("--")
            is_key = find_key(flag) is not None
            if name == flag and not equals:
                self.problems.append(UserError(f"`{word}` is not `NAME=value`", hint=self.hint_for_word(word)))
                continue
            if not equals and rest and (is_key or ("=" not in rest[0] and not rest[0].startswith("--"))):
                text = rest.pop(0)
            elif not equals and is_key:
                self.problems.append(UserError(f"`{word}` has no value"))
                continue
            assignments.append(_Word(flag if is_key else name, text, make=False))
        return assignments

    def hint_for_word(self, word: str) -> str:
        if word.endswith((".yaml", ".yml")) or preset_path(word).is_file():
            return f"did you mean `CONFIG={word}`?"
        better = names.suggest(word, options=self.known)
        return (
            f"did you mean `{variable_name(better)}=...`?" if better else "everything after the command is `NAME=value`"
        )

    def take(self, word: _Word) -> None:
        """Store an assignment as an option or an override, or report it."""
        key = word.key()
        if self.takes(word.name):
            if not word.text.strip() and word.name not in ("JSON", "PROMPT"):
                hint = f"give it a value, or omit `{word.name}=`"
                self.problems.append(UserError(f"`{word.name}` is empty", hint=hint))
            elif self.is_new(word.name, self.options.get(word.name, word.text), word):
                self.options[word.name] = word.text
        elif key == "model.trust_remote_code" and word.text.lower() in TRUE and self.of_run:
            self.trusts_code = True  # the run's configuration is unchanged; the consent is for this command only
        elif key is None:
            self.problems.append(self.unknown(word))
        elif not self.row.overrides:
            problem = f"`{word.origin}`: `{self.make}{self.command}` takes no configuration keys"
            self.problems.append(UserError(problem, hint=f"it takes {_listed(self.row.options) or 'no variables'}"))
        elif self.is_new(key, self.overrides[key].text if key in self.overrides else word.text, word):
            self.overrides[key] = Override(key=key, text=word.text, origin=word.origin)

    def takes(self, name: str) -> bool:
        """Return whether the command has this option."""
        return name in self.row.options

    def is_new(self, name: str, before: str, word: _Word) -> bool:
        if before == word.text:
            return True
        self.problems.append(UserError(f"`{name}` is given twice: `{before}` and `{word.text}`", hint="give it once"))
        return False

    def refuse_untyped(self, environ: Mapping[str, str]) -> None:
        """Refuse what was set in the environment instead of typed: `NUM_NODES=2 TRAIN_EPOCHS=1 make train-distributed`.

        Other programs set variables that begin as those of `slurm.` and `kubernetes.` do, and HOST (tcsh, conda).
        """
        taken = [*(name for name in VARIABLES if self.takes(name)), *sorted(filter(self.takes, environ))]
        taken = [name for name in taken if name != "HOST"]
        untyped = {
            name: option
            for option in dict.fromkeys(taken)
            if option not in self.options
            for name in (option, f"SFT_{option}")
            if environ.get(name, "").strip()
        }
        for name in sorted(environ.keys() & variables().keys()) if self.row.overrides else ():
            key = variables()[name]
            if environ[name].strip() and key not in self.overrides and not key.startswith(("slurm.", "kubernetes.")):
                untyped[name] = name
        for name in sorted(environ):
            word = name.removeprefix("SFT_PLAY_")
            # Kubernetes describes a service `sft-play` to pods as SFT_PLAY_SERVICE_HOST, SFT_PLAY_PORT_80_TCP ...
            others = word.startswith("TEST_") or re.search("_SERVICE_|_PORT(_|$)", name)
            if word != name and word not in OWN_VARIABLES and not others:
                close = get_close_matches(word, OWN_VARIABLES, n=1)
                hint = f"did you mean `SFT_PLAY_{close[0]}`?" if close else f"`unset {name}`"
                self.problems.append(UserError(f"unknown variable `{name}`", place="environment", hint=hint))
        if untyped:
            words = [f"{option}={mask(option, shlex.quote(environ[name]))}" for name, option in untyped.items()]
            are = "is" if len(untyped) == 1 else "are"
            text = f"{_listed(untyped)} {are} in the environment, and read after the command only"
            hint = (
                f"type `{self.make}{self.command} {' '.join(words)} ...`; to ignore them: `unset {' '.join(untyped)}`"
            )
            self.problems.append(UserError(text, place="environment", hint=hint))

    def unknown(self, word: _Word) -> UserError:
        """Return the error for a name that this command does not take."""
        if word.name in self.known:
            better, text = self.instead(word.name), f"`{self.make}{self.command}` takes no `{word.name}`"
            if better:
                return UserError(text, hint=_did_you_mean(better))
            return UserError(text, hint=f"it is for {self.takers(word.name)}")
        if word.make and int(os.environ.get("MAKELEVEL") or 1) > 1:
            hint = (
                "make passes on what was typed to an outer make: put `MAKEOVERRIDES =` into that Makefile, and type"
                " what is meant for this one"
            )
            return UserError(f"unknown variable `{word.name}`, perhaps of an outer make", hint=hint)
        return UserError(f"unknown variable `{word.name}`", hint=self.hint(word))

    def hint(self, word: _Word) -> str:
        """Return what to type instead of an unknown variable."""
        if same := names.meant_key(word.name, word.text):
            pairs = [pair.split(": ") for pair in same.split("` and `")]
            return f"did you mean `{' '.join(f'{variable_name(key)}={value}' for key, value in pairs)}`?"
        if hint := names.hint_elsewhere(word.name):
            return hint
        if names.OF_PROGRAMS.fullmatch(word.name) and word.name.lower() not in names.ALIASES:
            return f"it is read from the environment: `export {word.name}={mask(word.name, word.text)}`"
        better = names.suggest(word.name, options=self.known - ({"RANK"} - self.row.options))  # elsewhere `NODE_RANK`
        better = self.instead(better) or better if better and not self.takes(better) else better
        if better in self.known and not self.takes(better):
            return f"did you mean `{better}`? It is for {self.takers(better)}"
        if better:
            return _did_you_mean(better)
        section = names.plain_word(word.name).partition("_")[0]
        if section in sections():
            return f"`docs/configuration.md` lists the keys of `{section}`"
        keys = ["`SECTION_KEY` for each key in `docs/configuration.md`"] if self.row.overrides else []
        takes = ", and ".join([*filter(None, [_listed(self.row.options)]), *keys])
        return f"`{self.make}{self.command}` takes {takes or 'no variables'}"

    def instead(self, option: str) -> str | None:
        """Return the key or variable that this command takes instead of an option of others."""
        ways = STANDS_FOR.get(option, "").split()
        return next((way for way in ways if self.takes(way) or (self.row.overrides and find_key(way))), None)

    def takers(self, option: str) -> str:
        takers = [f"`{self.make}{name}`" for name, row in self.commands.items() if option in row.options]
        return list_some(takers, MOST_TAKERS)


def _did_you_mean(better: str) -> str:
    """Return the suggestion of a key or an option."""
    meaning = f" ({VARIABLES[better]})" if better in VARIABLES else ""
    return f"did you mean `{variable_name(better)}=...`{meaning}?"


def _listed(options: Iterable[str]) -> str:
    return ", ".join(f"`{option}`" for option in sorted(options))
