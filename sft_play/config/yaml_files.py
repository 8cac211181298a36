"""YAML 1.2, read safely with the line of every value, and written for people and for other programs."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft_play.errors import UserError, printable
from sft_play.files import open_plain

BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULLS = frozenset({"", "~", "null", "Null", "NULL"})
INTEGER = re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
STANDARD_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq"))
KNOWN_TAGS = STANDARD_TAGS | {f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "value")}
LARGEST_FILE_BYTES = 128 * 2**10
LARGEST_NODES = 20_000
"""Values in a file once aliases are written out: a few lines of aliases can mean billions."""


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A YAML value and its line."""

    value: Any
    """Scalar, `list[YamlNode]` or `dict[str, YamlNode]`."""
    text: str | None = None
    """A plain scalar as written, for keys whose type is text: `revision: 0012` is `0012`."""
    line: int | None = None
    """Line of the value's key (or list entry), counted from 1."""

    def plain(self) -> Any:
        """Return the value as ordinary Python."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def place(self, path: Path, key: str) -> str:
        """Return `file:line` of a dotted key, or of the nearest part around it, or the file `path`."""
        node, line = self, None
        for name in key.split("."):
            if not isinstance(node.value, dict) or name not in node.value:
                break
            node = node.value[name]
            line = node.line or line
        return f"{path}:{line}" if line else str(path)


def is_writable(text: str) -> bool:
    """Return whether files and paths can contain a text: no null character, no lone surrogate."""
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text)


def wrap(value: Any, line: int | None = None) -> YamlNode:
    """Return ordinary Python as a `YamlNode`, every part at `line`."""
    if isinstance(value, Mapping):
        return YamlNode({str(key): wrap(part, line) for key, part in value.items()}, line=line)
    if isinstance(value, (list, tuple)):
        return YamlNode([wrap(part, line) for part in value], line=line)
    return YamlNode(value, line=line)


def resolve_scalar(text: str) -> Any:
    """Resolve a plain scalar by YAML 1.2's core schema."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def read_yaml(path: Path) -> YamlNode:
    """Read one document from `path`. Raise `UserError` with file, line and column."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a configuration file. Raise `UserError` if it cannot be read or is not text."""
    try:
        with open_plain(path, follow=True) as file:
            content = file.read(LARGEST_FILE_BYTES + 1)  # never all of a model that was named by mistake
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UserError(f"`{path}` cannot be read: {reason}") from error
    except ValueError as error:  # a null character in the path
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise UserError(f"`{path}` has more than {LARGEST_FILE_BYTES:,} bytes; expected a configuration file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError("not UTF-8 text", place=f"{path}:{line}") from error


def read_plain_yaml(path: Path) -> Any:
    """Read one document like `read_yaml`, as ordinary Python."""
    return read_yaml(path).plain()


def parse_yaml(text: str, name: str) -> YamlNode:
    """Parse one document; `name` is the place in errors. Raise `UserError`."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return _Builder(name).build(root, None) if root is not None else YamlNode(None, line=1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        context = f" {error.context}" if error.context else ""
        raise UserError(f"not YAML:{context} {error.problem}", place=place) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"not YAML: {error.reason} (character {error.character!r})", place=f"{name}:{line}") from error
    except (RecursionError, ValueError, OverflowError) as error:  # `"\UFFFFFFFF"` is not a character
        raise UserError(
            "not YAML that can be read: nested too deeply, or a character out of range", place=name
        ) from error


class _Builder:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def build(self, node: yaml.Node, line: int | None) -> YamlNode:
        """Return a node as a `YamlNode`; `line` is that of its key, since a value may start further down."""
        line = node.start_mark.line + 1 if line is None else line
        self.count += 1
        if self.count > LARGEST_NODES:
            raise UserError(
                f"more than {LARGEST_NODES} values once aliases are written out", place=f"{self.name}:{line}"
            )
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, line)
        self._refuse_tag(node)
        if isinstance(node, yaml.SequenceNode):
            return YamlNode([self.build(part, None) for part in node.value], line=line)
        assert isinstance(node, yaml.MappingNode)
        return YamlNode(self.mapping(node), line=line)

    def mapping(self, node: yaml.MappingNode) -> dict[str, YamlNode]:
        entries: dict[str, YamlNode] = {}
        lines: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError("a key is a list or a mapping; expected a name", place=f"{self.name}:{line}")
            self._refuse_tag(key_node)
            key = str(key_node.value)
            if key in entries:
                raise UserError(
                    f"`{key}` is here and in line {lines[key]}; expected it once", place=f"{self.name}:{line}"
                )
            lines[key] = line
            entries[key] = self.build(value_node, line)
        return entries

    def scalar(self, node: yaml.ScalarNode, line: int) -> YamlNode:
        text = str(node.value)
        self._refuse_tag(node)
        if node.style is not None:
            return YamlNode(text, line=line)
        return YamlNode(resolve_scalar(text), text=text, line=line)

    def _refuse_tag(self, node: yaml.Node) -> None:
        """Refuse typed tags; a plain scalar has the tag that YAML 1.1 resolves it to, which is ignored here."""
        if node.tag not in KNOWN_TAGS:
            place = f"{self.name}:{node.start_mark.line + 1}"
            raise UserError(f"the tag `{node.tag.replace('tag:yaml.org,2002:', '!!')}` is not allowed", place=place)


# Templates.


FACT = re.compile(r"\$([a-z_][a-z_0-9]*)")


def fill(part: Any, facts: Mapping[str, Any]) -> Any:
    """Return a template's part with facts in place of `$name`, without what becomes empty or has a false `$if`.

    A list that replaces an entry of a list takes its place.
    """
    if isinstance(part, str):
        whole = FACT.fullmatch(part)
        return facts[whole[1]] if whole else FACT.sub(lambda name: str(facts[name[1]]), part)
    if isinstance(part, list):
        entries = [(entry, fill(entry, facts)) for entry in part]
        spliced = [value if isinstance(entry, str) and isinstance(value, list) else [value] for entry, value in entries]
        return [value for values in spliced for value in values if value is not None]
    if not isinstance(part, dict):
        return part
    if not fill(part.get("$if", True), facts):
        return None
    filled = {fill(key, facts): (value, fill(value, facts)) for key, value in part.items() if key != "$if"}
    return {key: new for key, (old, new) in filled.items() if new not in (None, [], {}) or new == old}


# Writing YAML: block style throughout and multi-line texts as literals, so that readers of YAML 1.1 and 1.2 agree.


PLAIN = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.+@=()<>!|\"-]*( [A-Za-z0-9_/.+@=()<>!|\"-]+)*")
OLD_BOOLEANS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
LITERAL = re.compile(r"[\x21-\x7e\xa1-\u2027\u2030-\ud7ff][\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff]*")
"""Texts that may be literal blocks: printable, and not beginning with a space, from which the indentation would be
taken.
"""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        plain = PLAIN.fullmatch(value) and isinstance(resolve_scalar(value), str) and value.lower() not in OLD_BOOLEANS
        literal = "\n" in value and LITERAL.fullmatch(value)  # in a list on one line PyYAML quotes it
        quote = "'" if '"' in value and value.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style="|" if literal else None if plain else quote)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(tuple, _Dumper.represent_list)
_Dumper.add_multi_representer(Mapping, _Dumper.represent_dict)  # type: ignore[type-abstract]


def _dump(documents: Sequence[Any], *, explicit_start: bool = False, flow: bool = False) -> str:
    text: str = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        explicit_start=explicit_start,
        sort_keys=False,
        default_flow_style=flow,
        allow_unicode=True,
        width=2**31,
    )
    return text


def scalar_text(value: Any) -> str:
    """Return a scalar, list or mapping as YAML on one line."""
    return _dump([[value]], flow=True)[1:-2]


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Return nested mappings as block YAML."""
    return _dump([value])


def dump_documents(documents: Sequence[Mapping[str, Any]], comment: str = "") -> str:
    """Return YAML documents as one file that begins with `comment`, each after its `---` and with its order of keys."""
    head = "".join(f"# {line}\n" for line in printable(comment).splitlines())
    return head + _dump(documents, explicit_start=True)
