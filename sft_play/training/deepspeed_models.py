"""Check a JSON by DeepSpeed's own models: `python -m sft_play.training.deepspeed_models <settings.json`.

The result is JSON on stdout. It runs in a separate process because DeepSpeed imports torch; nothing is initialised and
no device is used.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any


def problems_of(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return DeepSpeed's refusals: its `words` and the dotted `key` that they are about (empty if unknown)."""
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
    from deepspeed.utils.logging import get_log_level_from_string
    from pydantic import ValidationError

    # This is one process; the global batch was already compared with the plan's.
    alone = {
        **settings,
        "train_batch_size": settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"],
    }
    checks: tuple[Callable[[dict[str, Any]], object], ...] = (
        DeepSpeedConfig,
        lambda part: get_log_level_from_string(part.get("log_level") or "info"),
        lambda part: [DtypeEnum(name) for name in (part.get("data_types") or {}).values() if name],
    )
    problems = []
    for build in checks:
        try:
            build(deepcopy(alone))
        except Exception as error:  # noqa: BLE001 - whatever it raises would end a worker
            words = str(error)
            details: list[Any] = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": words}]
            # Many of its errors do not name the key, or not the section: it is what they are no longer about without.
            without = {key: _words_without(alone, key, build) for key in _keys(settings)}
            blamed = sorted((key for key in without if without[key] != words), key=lambda key: without[key] != "")
            for detail in details:
                end = ".".join(map(str, detail["loc"]))
                named = [key for key in blamed if f".{key}".endswith(f".{end}")] or blamed or [end]
                problems.append({"key": named[0], "words": detail["msg"]})
    return problems


def _words_without(settings: Mapping[str, Any], dotted: str, build: Callable[[dict[str, Any]], object]) -> str:
    """Return what DeepSpeed says of settings without a key."""
    rest = deepcopy(dict(settings))
    *sections, name = dotted.split(".")
    del functools.reduce(dict.__getitem__, sections, rest)[name]
    try:
        build(rest)
    except Exception as error:  # noqa: BLE001
        return str(error)
    return ""


def _keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys, the deepest first."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
    yield from (f"{prefix}{name}" for name in settings)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints to stdout
        result = problems_of(json.load(sys.stdin))
    print(json.dumps(result))
