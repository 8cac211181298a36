"""`${section.key}` and OmegaConf's own resolvers (`${oc.env:HOME}`) in values that come from files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sft_play.config.keys import find_key, schema_keys
from sft_play.config.layers import Value
from sft_play.config.reader import options
from sft_play.config.yaml_files import YamlNode, resolve_scalar, wrap
from sft_play.errors import SECRET_VARIABLE, UserError, first_line, mask

PLAIN_VARIABLE = re.compile(
    r"PWD|TMPDIR|SCRATCH|WORK|USER|LOGNAME|(SFT|SLURM|CUDA)_\w+"
    r"|(\w+_)?(HOME|DIR|FOLDER|PATH|ROOT|FILE|NAME|HOSTNAME|ID|DATA|MODEL|SEED|LENGTH|SIZE|STEPS|EPOCHS|RATE|COUNT"
    r"|RANK)"
)
"""Environment variables that `${oc.env:NAME}` may read: a configuration is shown, and saved in the run folder."""


def interpolate(values: Mapping[str, Value], problems: list[UserError]) -> dict[str, Value]:
    """Return the values with every `${...}` resolved; each that cannot be resolved is omitted and reported."""
    resolved = dict(values)
    open_keys = [key for key, value in values.items() if not value.literal and "${" in " ".join(texts_in(value.node))]
    if not open_keys:
        return resolved
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_resolver("oc.env", _variable, replace=True)
    tree, unresolved = OmegaConf.create({}), (OmegaConfBaseException, RecursionError, ValueError, TypeError)
    defaults = {key.name: key.default for key in schema_keys().values()}
    for key, plain in (defaults | {key: _as_read(key, value) for key, value in values.items()}).items():
        try:
            OmegaConf.update(tree, key, plain)
        except unresolved as error:  # not OmegaConf's grammar at all
            problems.append(_problem(key, resolved.pop(key), error))
    for key in [key for key in open_keys if key in resolved]:
        value = resolved[key]
        try:
            selected = OmegaConf.select(tree, key, throw_on_missing=True)
            plain = OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else selected
        except unresolved as error:
            problems.append(_problem(key, resolved.pop(key), error))
            continue
        # Interpolated text (`${oc.env:N}`, `0.${x}`) may be a number.
        line = value.node.line
        node = YamlNode(resolve_scalar(plain), plain, line) if isinstance(plain, str) else wrap(plain, line)
        resolved[key] = replace(value, node=node)
    return resolved


def _problem(key: str, value: Value, error: Exception) -> UserError:
    return UserError(f"`{key}` cannot be resolved: {first_line(error)}", place=value.origin)


def _variable(name: str, *default: Any) -> Any:
    """Resolve `${oc.env:NAME}` unless it may be a secret, since a configuration is shown and saved in the run's
    folder.
    """
    from omegaconf.resolvers import oc

    if not PLAIN_VARIABLE.fullmatch(name) or SECRET_VARIABLE.search(name):
        raise ValueError(
            f"`{name}` could be a secret, and configurations are kept in files; `oc.env` takes HOME, USER,"
            " SCRATCH, SLURM_*, SFT_* and names that end in _DIR, _PATH, _FILE, _NAME, _DATA, _MODEL and the like"
        )
    value = oc.env(name, *default)
    if isinstance(value, str) and mask(name, value) != value:
        raise ValueError(
            f"the value of `{name}` looks like a secret, and what a configuration contains is kept in files"
        )
    return value


def _as_read(key: str, value: Value) -> Any:
    """Return a value as `${key}` reads it: text as written (`0012`), everything else by its type."""
    target, node = find_key(key), value.node
    is_text = target is not None and str in options(target.annotation) and None not in (node.text, node.value)
    plain = node.text if is_text else node.plain()
    return _escaped(plain) if value.literal else plain


def texts_in(node: YamlNode) -> Iterator[str]:
    """Yield every text and every name in a value."""
    if isinstance(node.value, dict):
        yield from node.value
    if isinstance(node.value, dict | list):
        for part in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from texts_in(part)
    elif isinstance(node.value, str):
        yield node.value


def _escaped(plain: Any) -> Any:
    """Return `plain` with every `${` escaped for OmegaConf: `\\${`, and backslashes before it doubled."""
    if isinstance(plain, Mapping):
        return {key: _escaped(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [_escaped(part) for part in plain]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", plain) if isinstance(plain, str) else plain
