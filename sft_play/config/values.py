"""Values on their way to a configuration: what was written where, which layer wins, and `${...}` resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

from sft_play.config import names
from sft_play.config.keys import REQUIRED, Key, find_key, schema_keys
from sft_play.config.types import INVALID, allows_null, convert, describe, options, shown, takes_text
from sft_play.config.yaml_files import Node, parse_yaml, resolve_scalar, wrap
from sft_play.errors import UserError

REFERENCE = re.compile(r"\$\{([\w.\[\]]+)\}")
MOST_RESOLVED = 2**20
"""Characters that one value may have after its interpolations: `${a}${a}` doubles at each step."""

GLOBAL_BATCH = "train.global_batch_size"
RIVALS: Mapping[str, str] = {
    "data.train_path": "data.sources",
    "data.sources": "data.train_path",
    "data.val_path": "data.validation",
    "data.validation": "data.val_path",
    "train.warmup_ratio": "train.warmup_steps",
    "train.warmup_steps": "train.warmup_ratio",
}
"""Two ways to say one thing: the later layer's replaces the earlier one's. Both in one file are a contradiction."""
TRAINING, VALIDATION = ("data.train_path", "data.sources"), ("data.val_path", "data.validation")


@dataclass(frozen=True, slots=True)
class Value:
    """One value before it is checked."""

    node: Node
    origin: str
    literal: bool = False
    """Whether `${` in it stands for itself: what was typed on a command line is never interpolated."""
    layer: int = 0
    """Number of the file, environment or command line that it came from; the higher wins."""


@dataclass(slots=True)
class Values:
    """Values collected so far, and what is wrong with them."""

    values: dict[str, Value] = field(default_factory=dict)
    problems: list[UserError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    layer: int = 0
    presets: dict[int, str] = field(default_factory=dict)
    """Layer -> name of the shipped preset that it is: its validation data belong to its training data."""

    def put(self, key: str, node: Node, origin: str, *, literal: bool = False) -> None:
        """Sets a key over what earlier layers said, and takes away what contradicts it there."""
        rival = RIVALS.get(key)
        if rival in self.values and self.values[rival].layer < self.layer:
            del self.values[rival]
        if key in TRAINING:
            for other in VALIDATION:
                if other in self.values and self.values[other].layer < self.layer and self.values[other].layer in self.presets:
                    del self.values[other]
        if key == "train.eval_strategy" and node.value != "steps":
            inherited = self.values.get("train.eval_steps")
            if inherited and inherited.layer < self.layer:
                del self.values["train.eval_steps"]
        before = self.values.get(key)
        if before and before.layer == self.layer:  # `train.seed: 1` and `train: {seed: 2}` in one file
            self.problems.append(UserError(f"`{key}` is given twice, also in {before.origin}", place=origin, hint="give it once"))
        self.values[key] = Value(node, origin, literal, self.layer)

    def settle_batch(self) -> None:
        """Lets two numbers of a step outrank an earlier layer's global batch: what is typed outranks a file (contract B2)."""
        numbers = [self.values.get(key) for key in ("train.batch_size", "train.grad_accum", GLOBAL_BATCH)]
        micro, steps, rows = (value if value and value.node.value != "auto" else None for value in numbers)
        if not (micro and steps and rows) or rows.layer >= min(micro.layer, steps.layer):
            return
        del self.values[GLOBAL_BATCH]
        self.notices.append(
            f"the rows of a step are {shown(micro.node)} x {shown(steps.node)} x the number of devices, by `{micro.origin}` and `{steps.origin}`: "
            f"they outrank `{GLOBAL_BATCH}` {shown(rows.node)} of {rows.origin}"
        )

    def put_text(self, key: str, text: str, origin: str) -> None:
        """Sets a key from text that was typed: the key's type says what it means."""
        known = find_key(key)
        assert known is not None
        try:
            self.put(key, node_of_text(text, known), origin, literal=True)
        except UserError as error:
            self.problems.append(UserError(f"`{key}` is `{shown(Node(text))}`: {error.message}", place=origin, hint=error.hint))


def node_of_text(text: str, key: Key) -> Node:
    """Returns the value of `text` as `key` takes it: text letter for letter, lists and mappings as YAML, else one scalar.

    Nothing at all, or `null`, is null where the key allows it. Raises `UserError` for a list or mapping that is not YAML.
    """
    parts = options(key.annotation)
    if text in ("", "null") and allows_null(key.annotation):
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


def expected(key: Key, text: str) -> str:
    """Returns what a key takes in words where `text` is none of its values; nothing where it is."""
    try:
        node = as_meant(key.name, node_of_text(text, key))
    except UserError:
        return describe(key.annotation, key.limits)
    wrong = not text or not text.isprintable() or convert(node, key.annotation, key.limits, key.name, []) is INVALID
    return describe(key.annotation, key.limits) if wrong else ""


ALSO_TAKEN: Mapping[str, str] = {"train.packing": "boolean", "tuning.lora.target_modules": "string"}
"""Key -> JSON type of the values that `as_meant` knows."""


def as_meant(key: str, node: Node) -> Node:
    """Returns what a value that other tools take for this key is here: `packing: true`, `target_modules: all-linear` or `q_proj,v_proj`."""
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
    """Resolves `${section.key}` and OmegaConf's own resolvers (`${oc.env:HOME}`) in values that come from files."""
    open_ones = [key for key, value in found.values.items() if not value.literal and _has_interpolation(value.node)]
    if not open_ones:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_resolver("oc.env", _variable, replace=True)
    unresolved = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
    texts = {path: text for key, value in found.values.items() for path, text in _texts(key, value.node.plain()).items()}
    sizes: dict[str, int] = {}
    for key in list(open_ones):
        try:
            if any(_resolved_size(path, texts, sizes) > MOST_RESOLVED for path in texts if f"{path}.".startswith(f"{key}.")):
                raise ValueError(f"it would grow beyond {MOST_RESOLVED:,} characters")
            OmegaConf.create({"value": found.values[key].node.plain()})
        except unresolved as error:  # not OmegaConf's grammar at all
            _cannot_resolve(key, error, found)
            open_ones.remove(key)
    written = {
        key: escaped(_as_read(key, value)) if value.literal else _as_read(key, value) for key, value in found.values.items()
    }
    merged = OmegaConf.merge(OmegaConf.create(_tree_of(_defaults())), OmegaConf.create(_tree_of(written)))
    for key in open_ones:
        try:
            resolved = OmegaConf.select(merged, key, throw_on_missing=True)
            plain = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
        except unresolved as error:
            _cannot_resolve(key, error, found)
            continue
        value = found.values[key]
        found.values[key] = Value(_again(wrap(plain, value.node.line)), value.origin, layer=value.layer)


def _texts(name: str, plain: Any) -> dict[str, str]:
    """Returns every text in a value by its path: `data.sources.0.path`."""
    if not isinstance(plain, (dict, list)):
        return {name: str(plain)}
    parts = plain.items() if isinstance(plain, dict) else enumerate(plain)
    return {path: text for key, part in parts for path, text in _texts(f"{name}.{key}", part).items()}


def _resolved_size(path: str, texts: Mapping[str, str], sizes: dict[str, int]) -> int:
    """Returns about how many characters a text has with every `${other}` in it replaced; `sizes` holds those that are known."""
    if path not in sizes:
        sizes[path] = 0  # a circle adds nothing here; OmegaConf reports it
        named = [re.sub(r"\[(\w+)\]", r".\1", name).lstrip(".") for name in REFERENCE.findall(texts[path])]
        others = [other for name in named for other in texts if f"{other}.".startswith(f"{name}.") or other.endswith(f".{name}")]
        sizes[path] = len(texts[path]) + sum(_resolved_size(other, texts, sizes) for other in others)
    return sizes[path]


def _variable(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}` of a name that is plainly no secret: what a configuration holds is kept in the run folder and shown."""
    from omegaconf.resolvers import oc

    if not names.PLAIN_VARIABLE.fullmatch(name) or names.SECRET_VARIABLE.search(name):
        raise ValueError(
            f"`{name}` could be a secret, and what a configuration holds is kept in files; `oc.env` takes HOME, USER, SCRATCH, SLURM_*,"
            " SFT_* and names that end in _DIR, _PATH, _FILE, _NAME, _DATA, _MODEL and the like"
        )
    value = oc.env(name, *default)
    if isinstance(value, str) and names.mask(name, value) != value:
        raise ValueError(f"the value of `{name}` looks like a secret, and what a configuration holds is kept in files")
    return value


def _as_read(key: str, value: Value) -> Any:
    """Returns a value as others see it through `${key}`: text as it is written (`0012`), everything else by its type."""
    known, node = find_key(key), value.node
    as_text = known is not None and takes_text(known.annotation) and node.text is not None and node.value is not None
    return node.text if as_text else node.plain()


def _again(node: Node) -> Node:
    """Text that was put together (`${oc.env:N}`, `0.${x}`) may be a number."""
    return Node(resolve_scalar(node.value), text=node.value, line=node.line) if isinstance(node.value, str) else node


def _cannot_resolve(key: str, error: Exception, found: Values) -> None:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    value = found.values.pop(key)
    found.problems.append(UserError(f"`{key}` cannot be resolved: {first}", place=value.origin))


def _has_interpolation(node: Node) -> bool:
    if isinstance(node.value, dict):
        return any(_has_interpolation(part) for part in node.value.values())
    if isinstance(node.value, list):
        return any(_has_interpolation(part) for part in node.value)
    return isinstance(node.value, str) and "${" in node.value


def escaped(plain: Any) -> Any:
    """Returns `plain` with every `${` standing for itself in OmegaConf, which takes `\\${` so, and backslashes before it in pairs."""
    if isinstance(plain, Mapping):
        return {key: escaped(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [escaped(part) for part in plain]
    if not isinstance(plain, str) or "${" not in plain:
        return plain
    pieces = plain.split("${")
    ends = [piece + "\\" * (len(piece) - len(piece.rstrip("\\"))) for piece in pieces[:-1]]
    return "\\${".join([*ends, pieces[-1]])


def _defaults() -> dict[str, Any]:
    return {key.name: key.default for key in schema_keys().values() if key.default is not REQUIRED}


def _tree_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree
