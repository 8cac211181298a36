"""Configuration files: where they are found, what they extend, and the values they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from sft_play.config import names
from sft_play.config.keys import find_key, sections
from sft_play.config.types import shown
from sft_play.config.values import Values
from sft_play.config.yaml_files import Node, read_yaml
from sft_play.errors import UserError
from sft_play.files import is_file_name

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""Where the folders `configs`, `deepspeed` and `examples` are: beside the package in a clone, inside it in a wheel (`setup.py`)."""
PRESETS = SHIPPED / "configs"
"""The shipped presets."""
DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files; `.json` may be a configuration too."""
MOST_FILES = 100
"""Files that one configuration may extend, each time counted: files that extend one another twice would be read for ever."""
MOST_SUGGESTIONS = 40
"""Unknown keys for which a better name is looked for: it takes milliseconds each."""


def config_path(name: str) -> Path:
    """Returns the file that `CONFIG=` names; a bare preset name is its file. Raises `UserError`."""
    path = Path(name)
    preset = preset_path(name)
    check_name(name, "CONFIG")
    if not path.suffix and path.name == name and not path.exists() and preset.is_file():
        return preset
    if path.is_dir():
        raise UserError(f"`{name}` is a folder; expected a YAML file")
    if path.suffix.lower() in DATA:
        raise UserError(
            f"`{name}` holds rows, and is not a configuration", hint=f"make train CONFIG=file.yaml DATA_TRAIN_PATH={name}"
        )
    if not path.is_file():
        near = names.closest_file(path, PRESETS)
        raise UserError(
            f"there is no file `{name}`",
            hint=f"did you mean `{near if Path(near).is_file() else Path(near).stem}`?"
            if near
            else "CONFIG= takes a YAML file or a preset's name",
        )
    return path


def preset_path(name: str) -> Path:
    """Returns the path of a preset."""
    return shipped(f"configs/{name}.yaml")


def shipped(name: str) -> Path:
    """Returns the path of a shipped file, as short as it can be shown; a copy by `sft-play init`, perhaps changed since, comes first."""
    if Path(name).is_file():
        return Path(name)
    path = SHIPPED / name
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_file(path: Path, found: Values, chain: tuple[Path, ...] = ()) -> None:
    """Adds a file's values as one layer, over those of its parents. Raises `UserError` for what is not a mapping of YAML."""
    if max(found.layer, len(chain)) >= MOST_FILES:
        raise UserError(f"`extends` leads to more than {MOST_FILES} files", place=str(chain[0] if chain else path))
    if path.resolve() in (other.resolve() for other in chain):
        way = " -> ".join(str(p) for p in (*chain, path))
        raise UserError(f"`extends` goes round in a circle: {way}", place=str(chain[0]))
    root = read_yaml(path)
    if root.value is None:
        root = Node({}, line=1)
    if not isinstance(root.value, dict):
        raise UserError(
            f"`{shown(root)}` is not a mapping of sections", place=f"{path}:{root.line}", hint="a file begins with `model:`"
        )
    tree = dict(root.value)
    for parent in _parents(tree.pop("extends", None), path):
        read_file(parent, found, (*chain, path))
    found.layer += 1
    if path.resolve().parent == PRESETS:
        found.presets[found.layer] = path.stem
    for key, node in leaves(Node(tree, line=1), ""):
        place = f"{path}:{node.line}"
        if find_key(key) is None:
            found.problems.append(_unknown_key(key, place, node, look=len(found.problems) < MOST_SUGGESTIONS))
        else:
            found.put(key, node, place)


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
            hint = f"did you mean `{Path(near).stem}`?" if near else "files count from the folder of the file that extends"
            raise UserError(f"`extends` is `{name}`, which is neither a preset nor a file", place=place, hint=hint)
    return parents


def leaves(node: Node, prefix: str) -> Iterable[tuple[str, Node]]:
    """Yields dotted key -> node of a mapping, going into sections only."""
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
    """Raises `UserError` where `name` can be no path."""
    if not is_file_name(name):
        raise UserError(f"`{what}` is `{shown(Node(name))}`, which no file can be called")


def _unknown_key(key: str, place: str, node: Node, *, look: bool = True) -> UserError:
    if not key:
        return UserError("a key is empty; expected a name", place=place)
    if key in sections():
        first = {"data": "train_path", "model": "name", "tuning": "mode"}.get(key)
        hint = f"did you mean `{key}.{first}: {shown(node)}`?" if first and isinstance(node.value, str) else None
        return UserError(f"`{key}` is `{shown(node)}`; expected a mapping of its keys", place=place, hint=hint)
    if refusal := names.refusal(key):
        instead, why = refusal
        return UserError(f"`{key}` is not taken: {why}", place=place, hint=f"use `{instead}`" if instead else None)
    section, _, leaf = key.rpartition(".")
    if leaf == "<<":
        return UserError("YAML 1.2 has no merge key `<<`", place=place, hint="`extends:` takes the keys of another file")
    if names.SECRET.fullmatch(leaf):
        return UserError(f"unknown key `{key}`", place=place, hint=names.SECRETS_HINT)
    word = names.plain_word(leaf)
    if hint := names.INSTEAD.get(word) or names.environment_hint(word, shown(node)):
        return UserError(f"unknown key `{key}`", place=place, hint=hint)
    if meant := names.settings(leaf, node.text if node.text is not None else str(node.value)):
        return UserError(f"unknown key `{key}`", place=place, hint=f"here that is {_listed(meant)}")
    inner = next((one for one in sections() if not section and one.endswith(f".{leaf.removesuffix('_config')}")), None)
    better = (
        inner
        or (None if section or leaf.lower() in names.ALIASES else names.closest_section(leaf))
        or (names.suggest(leaf, section) if look else None)
    )
    if better == "data.train_path" and isinstance(node.value, list):
        better = "data.sources"
    hint = f"did you mean `{better}`?" if better else "docs/configuration.md lists every key"
    return UserError(f"unknown key `{key}`", place=place, hint=hint)


def _listed(meant: Mapping[str, str]) -> str:
    return " and ".join(f"`{key}={value}`, typed" if key.isupper() else f"`{key}: {value}`" for key, value in meant.items())
