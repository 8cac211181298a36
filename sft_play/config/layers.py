"""The layers of a configuration: files with what they extend, which value wins, and `${...}` resolved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from sft_play.config import names
from sft_play.config.keys import Key, find_key, schema_keys, sections, variable_name
from sft_play.config.reader import INVALID, convert, describe, options, quoted, shown
from sft_play.config.schema import needs_own_word
from sft_play.config.yaml_files import Node, parse_yaml, read_yaml, resolve_scalar, wrap
from sft_play.errors import SECRET_VARIABLE, UserError, first_line, mask
from sft_play.files import is_file_name
from sft_play.runs.folder import in_run

GLOBAL_BATCH = "train.global_batch_size"
PLAIN_VARIABLE = re.compile(
    r"PWD|TMPDIR|SCRATCH|WORK|USER|LOGNAME|(SFT|SLURM|CUDA)_\w+"
    r"|(\w+_)?(HOME|DIR|FOLDER|PATH|ROOT|FILE|NAME|HOSTNAME|ID|DATA|MODEL|SEED|LENGTH|SIZE|STEPS|EPOCHS|RATE|COUNT|RANK)"
)
"""Environment variables that `${oc.env:NAME}` takes into a configuration, which is shown and kept in the run folder."""
TRAINING, VALIDATION = ("data.train_path", "data.sources"), ("data.val_path", "data.validation")
WITHOUT_OTHERS = (None, "none", "tensorboard", ["tensorboard"])
"""Values of `train.report_to` that call nobody."""
RIVALS = (TRAINING, VALIDATION, ("train.warmup_ratio", "train.warmup_steps"))
"""Two ways to say one thing: the later layer's replaces the earlier one's. Both in one file are a contradiction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One key given on the command line."""

    key: str
    """`train.learning_rate`"""
    text: str
    """The value letter for letter; `config.load` gives it its type."""
    origin: str
    """As the user typed it: `make TRAIN_LEARNING_RATE=1e-4`."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value before it is checked."""

    node: Node
    origin: str
    literal: bool = False
    """Whether `${` in it stands for itself: what was typed on a command line is never interpolated."""
    layer: int = 0
    """Number of the file, environment or command line that it came from; the higher wins."""
    of_run: bool = False
    """Whether a file of a run's folder says it, which may be a stranger's."""


@dataclass(slots=True)
class Values:
    """Values collected so far, and what is wrong with them."""

    values: dict[str, Value] = field(default_factory=dict)
    problems: list[UserError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    layer: int = 0
    of_run: bool = False
    """Whether what is put now comes from a file of a run's folder."""
    presets: dict[int, str] = field(default_factory=dict)
    """Layer -> name of the shipped preset that it is: its validation data belong to its training data."""

    def put(self, key: str, node: Node, origin: str, *, literal: bool = False) -> None:
        """Set a key over what earlier layers said, and take away what contradicts it there."""
        if self.of_run and needs_own_word(key):
            known = find_key(key)
            if known is not None and node.plain() not in (known.default, *WITHOUT_OTHERS):
                notice = (
                    f"`{key}` is not taken from a run's folder: type {variable_name(key)}=... with the command if you"
                    " want it"
                )
                self.notices += [] if notice in self.notices else [notice]
            return
        inherited = [other for other, value in self.values.items() if value.layer < self.layer]
        gone = {other for pair in RIVALS if key in pair for other in pair}
        if key in TRAINING:
            gone |= {other for other in VALIDATION if other in inherited and self.values[other].layer in self.presets}
        if key == "train.eval_strategy" and node.value != "steps":
            gone.add("train.eval_steps")
        for other in gone.intersection(inherited) - {key}:
            del self.values[other]
        before = self.values.get(key)
        if before and before.layer == self.layer:  # `train.seed: 1` and `train: {seed: 2}` in one file
            self.problems.append(
                UserError(f"`{key}` is given twice, also in {before.origin}", place=origin, hint="give it once")
            )
        self.values[key] = Value(node, origin, literal, self.layer, self.of_run)

    def settle_batch(self) -> None:
        """Let two numbers of a step outrank an earlier layer's global batch: what is typed outranks a file (STATUS
        B2).
        """
        numbers = [self.values.get(key) for key in ("train.batch_size", "train.grad_accum", GLOBAL_BATCH)]
        micro, steps, rows = (value if value and value.node.value != "auto" else None for value in numbers)
        if not (micro and steps and rows) or rows.layer >= min(micro.layer, steps.layer):
            return
        del self.values[GLOBAL_BATCH]
        self.notices.append(
            f"the rows of a step are {shown(micro.node)} x {shown(steps.node)} x the number of devices, by"
            f" `{micro.origin}` and `{steps.origin}`: they outrank `{GLOBAL_BATCH}` {shown(rows.node)} of {rows.origin}"
        )

    def put_text(self, key: str, text: str, origin: str) -> None:
        """Set a key from text that was typed: the key's type says what it means."""
        known = find_key(key)
        assert known is not None
        try:
            self.put(key, node_of_text(text, known), origin, literal=True)
        except UserError as error:
            self.problems.append(
                UserError(f"`{key}` is `{quoted(text)}`: {error.message}", place=origin, hint=error.hint)
            )


def node_of_text(text: str, key: Key) -> Node:
    """Return the value of `text` as `key` takes it: text letter for letter, lists and mappings as YAML, else one
    scalar.

    Nothing at all, or `null`, is null where the key allows it. Raise `UserError` for a list or mapping that is not
    YAML.
    """
    parts = options(key.annotation)
    if text in ("", "null") and type(None) in parts:
        return Node(None)
    if all(part in (str, type(None)) for part in parts):
        return Node(text)
    holds_more = any((get_origin(part) or part) in (list, dict, Mapping) for part in parts)
    if holds_more and text.lstrip().startswith(("[", "{", "- ")):
        return parse_yaml(text, key.name)
    value = resolve_scalar(text.strip())
    if value is None or isinstance(value, str):
        value = text if str in parts else text.strip()
    return Node(value, text=text)


def explain_mismatch(key: Key, text: str) -> str:
    """Return what a key takes in words where `text` is none of its values; nothing where it is."""
    try:
        node = as_meant(key.name, node_of_text(text, key))
    except UserError:
        return describe(key.annotation)
    wrong = not text or not text.isprintable() or convert(node, key.annotation, key.name, []) is INVALID
    return describe(key.annotation) if wrong else ""


ALSO_TAKEN: Mapping[str, str] = {"train.packing": "boolean", "tuning.lora.target_modules": "string"}
"""Key -> JSON type of the values that `as_meant` knows."""


def as_meant(key: str, node: Node) -> Node:
    """Return what a value that other tools take for this key is here: `packing: true`, `target_modules: all-linear` or
    `q_proj,v_proj`.
    """
    value = node.value
    if key == "train.packing" and isinstance(value, bool):
        return Node("on" if value else "off", line=node.line)
    if key == "tuning.lora.target_modules" and isinstance(value, str):
        names = [name.strip() for name in value.split(",") if name.strip()]
        if names in (["all-linear"], ["all"], ["auto"]):
            return Node("auto", line=node.line)
        return wrap(names, node.line) if names else node
    return node


def interpolate(found: Values) -> None:
    """Resolve `${section.key}` and OmegaConf's own resolvers (`${oc.env:HOME}`) in values that come from files."""
    open_ones = [
        key
        for key, value in found.values.items()
        if not value.literal and any("${" in one for one in texts_in(value.node))
    ]
    if not open_ones:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_resolver("oc.env", _variable, replace=True)
    unresolved = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
    for key in list(open_ones):
        try:
            OmegaConf.create({"value": found.values[key].node.plain()})
        except unresolved as error:  # not OmegaConf's grammar at all
            _cannot_resolve(key, error, found)
            open_ones.remove(key)
    tree: dict[str, Any] = {}
    defaults = {key.name: key.default for key in schema_keys().values()}
    for key, plain in (defaults | {key: _as_read(key, value) for key, value in found.values.items()}).items():
        *path, last = key.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = plain
    merged = OmegaConf.create(tree)
    texts = _texts_by_path(tree)
    for key in open_ones:
        value = found.values[key]
        if _length(key, texts, {}) > LONGEST_RESOLVED:
            long = f"it would have more than {LONGEST_RESOLVED:,} characters once every `${{...}}` is written out"
            _cannot_resolve(key, ValueError(long), found)
            continue
        try:
            resolved = OmegaConf.select(merged, key, throw_on_missing=True)
            plain = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
        except unresolved as error:
            _cannot_resolve(key, error, found)
            continue
        # Text that was put together (`${oc.env:N}`, `0.${x}`) may be a number.
        node = (
            Node(resolve_scalar(plain), plain, value.node.line)
            if isinstance(plain, str)
            else wrap(plain, value.node.line)
        )
        found.values[key] = replace(value, node=node)


LONGEST_RESOLVED = 2**20
REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")


def _texts_by_path(tree: Any, path: str = "") -> dict[str, str]:
    """Return dotted path -> text of every text in a tree, list entries by their number."""
    if isinstance(tree, str):
        return {path: tree}
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return {
        name: text
        for key, part in parts
        for name, text in _texts_by_path(part, f"{path}.{key}".removeprefix(".")).items()
    }


def _length(path: str, texts: Mapping[str, str], known: dict[str, int]) -> int:
    """Return the letters below a path once references are written out, at least; those that go round in a circle are
    OmegaConf's to refuse.

    A few lines that name the line before them twice each would mean billions.
    """
    if path not in known:
        known[path] = 0
        for name, text in texts.items():
            if name == path or name.startswith(f"{path}."):
                known[path] += len(text)
                for dots, other in REFERENCE.findall(text):
                    parts = name.split(".")
                    base = parts[: -len(dots)] if dots else []
                    known[path] += _length(".".join([*base, other.replace("[", ".").replace("]", "")]), texts, known)
    return known[path]


def _variable(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}` of a name that is plainly no secret: what a configuration holds is kept in the run folder and
    shown.
    """
    from omegaconf.resolvers import oc

    if not PLAIN_VARIABLE.fullmatch(name) or SECRET_VARIABLE.search(name):
        raise ValueError(
            f"`{name}` could be a secret, and what a configuration holds is kept in files; `oc.env` takes HOME, USER,"
            " SCRATCH, SLURM_*, SFT_* and names that end in _DIR, _PATH, _FILE, _NAME, _DATA, _MODEL and the like"
        )
    value = oc.env(name, *default)
    if isinstance(value, str) and mask(name, value) != value:
        raise ValueError(f"the value of `{name}` looks like a secret, and what a configuration holds is kept in files")
    return value


def _as_read(key: str, value: Value) -> Any:
    """Return a value as others see it through `${key}`: text as it is written (`0012`), everything else by its type."""
    known, node = find_key(key), value.node
    as_text = (
        known is not None and str in options(known.annotation) and node.text is not None and node.value is not None
    )
    plain = node.text if as_text else node.plain()
    return escaped(plain) if value.literal else plain


def _cannot_resolve(key: str, error: Exception, found: Values) -> None:
    found.problems.append(
        UserError(f"`{key}` cannot be resolved: {first_line(error)}", place=found.values.pop(key).origin)
    )


def texts_in(node: Node) -> Iterator[str]:
    """Yield every text and every name in a value."""
    if isinstance(node.value, dict):
        for name, part in node.value.items():
            yield name
            yield from texts_in(part)
    elif isinstance(node.value, list):
        yield from (text for part in node.value for text in texts_in(part))
    elif isinstance(node.value, str):
        yield node.value


def escaped(plain: Any) -> Any:
    """Return `plain` with every `${` standing for itself in OmegaConf, which takes `\\${` so, and backslashes before it
    in pairs.
    """
    if isinstance(plain, Mapping):
        return {key: escaped(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [escaped(part) for part in plain]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", plain) if isinstance(plain, str) else plain


# Configuration files: where they are found, what they extend, and the values they hold.


_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""Where the folders `configs`, `deepspeed`, `examples` and `docs` are: beside the package in a clone, inside it in a
wheel (`setup.py`).
"""
PRESETS = SHIPPED / "configs"
"""The shipped presets."""
DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather")
"""Endings of data files; `.json` may be a configuration too."""


def config_path(name: str) -> Path:
    """Return the file that `CONFIG=` names; a bare preset name is its file. Raise `UserError`."""
    path = Path(name)
    preset = preset_path(name)
    check_name(name, "CONFIG")
    if not path.suffix and path.name == name and not path.exists() and preset.is_file():
        return preset
    if path.is_dir():
        raise UserError(f"`{name}` is a folder; expected a YAML file")
    if path.suffix.lower() in DATA:
        raise UserError(
            f"`{name}` holds rows, and is not a configuration",
            hint=f"make train CONFIG=file.yaml DATA_TRAIN_PATH={name}",
        )
    if not path.is_file():
        near = names.closest_file(path, PRESETS)
        raise UserError(
            f"there is no file `{name}`",
            hint=(
                f"did you mean `{near if Path(near).is_file() else Path(near).stem}`?"
                if near
                else "CONFIG= takes a YAML file or a preset's name"
            ),
        )
    return path


def preset_path(name: str) -> Path:
    """Return the path of a preset."""
    return shipped(f"configs/{name}.yaml")


def shipped(name: str) -> Path:
    """Return the path of a shipped file, as short as it can be shown; a copy by `sft-play init`, perhaps changed since,
    comes first.
    """
    if Path(name).is_file():
        return Path(name)
    path = SHIPPED / name
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_file(path: Path, found: Values, chain: tuple[Path, ...] = ()) -> None:
    """Add a file's values as one layer, over those of its parents. Raise `UserError` for what is not a mapping of
    YAML.
    """
    if path.resolve() in (other.resolve() for other in chain):
        way = " -> ".join(str(p) for p in (*chain, path))
        raise UserError(f"`extends` goes round in a circle: {way}", place=str(chain[0]))
    root = read_yaml(path)
    if root.value is None:
        root = Node({}, line=1)
    if not isinstance(root.value, dict):
        raise UserError(
            f"`{shown(root)}` is not a mapping of sections",
            place=f"{path}:{root.line}",
            hint="a file begins with `model:`",
        )
    tree = dict(root.value)
    for parent in _parents(tree.pop("extends", None), path):
        read_file(parent, found, (*chain, path))
    found.layer += 1
    found.of_run = is_of_run(path)
    if path.resolve().parent == PRESETS:
        found.presets[found.layer] = path.stem
    for key, node in leaves(Node(tree, line=1), ""):
        place = f"{path}:{node.line}"
        if find_key(key) is None:
            found.problems.append(names.unknown_key(key, place, node))
        else:
            found.put(key, node, place)
    found.of_run = False


def is_of_run(path: Path) -> bool:
    """Whether a configuration is (below) a run's: by its name and place, not by its contents, which a stranger
    chose.
    """
    return path.name == "config.json" or in_run(path)


def _parents(node: Node | None, path: Path) -> list[Path]:
    if node is None:
        return []
    place = f"{path}:{node.line}"
    parents = []
    for entry in node.value if isinstance(node.value, list) else [node]:
        name = entry.value if isinstance(entry.value, str) else entry.text
        if not name or not is_file_name(name):
            raise UserError(f"`extends` is `{shown(entry)}`; expected a preset's name or a file", place=place)
        beside, preset = path.parent / name, preset_path(name)
        if beside.is_file():
            parents.append(beside)
        elif "/" not in name and preset.is_file():
            parents.append(preset)
        else:
            near = names.closest_file(Path(name), PRESETS)
            if beside.with_name(f"{beside.name}.yaml").is_file():
                hint = f"did you mean `{name}.yaml`, the file next to this one?"
            else:
                hint = (
                    f"did you mean `{Path(near).stem}`?"
                    if near
                    else "files count from the folder of the file that extends"
                )
            raise UserError(f"`extends` is `{name}`, which is neither a preset nor a file", place=place, hint=hint)
    return parents


def leaves(node: Node, prefix: str) -> Iterable[tuple[str, Node]]:
    """Yield dotted key -> node of a mapping, going into sections only."""
    assert isinstance(node.value, dict)
    for name, part in node.value.items():
        key = f"{prefix}.{name}" if prefix else name
        if name and key in sections() and part.value is None:
            continue  # an empty section says nothing
        if name and key in sections() and isinstance(part.value, dict):
            yield from leaves(part, key)
        else:
            yield key, part


def check_name(name: str, what: str) -> None:
    """Raise `UserError` where `name` can be no path."""
    if not is_file_name(name):
        raise UserError(f"`{what}` is `{quoted(name)}`, which no file can be called")
