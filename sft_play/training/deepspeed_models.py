"""Check a JSON by DeepSpeed's own models: `python -m sft_play.training.deepspeed_models <settings.json`.

The result is JSON on stdout. It runs in a separate process because DeepSpeed imports torch; nothing is initialised and
no device is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
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
    checks = (
        ("", lambda: DeepSpeedConfig(alone)),
        ("log_level", lambda: get_log_level_from_string(settings.get("log_level") or "info")),
        ("data_types", lambda: [DtypeEnum(name) for name in (settings.get("data_types") or {}).values() if name]),
    )
    problems = []
    for dotted, build in checks:
        try:
            build()
        except ValidationError as error:
            problems += [
                {"key": _key(settings, error.title, detail["loc"]), "words": detail["msg"]} for detail in error.errors()
            ]
        except Exception as error:  # noqa: BLE001 - whatever it raises would end a worker
            words = str(error)
            named = max((key for key in _keys(settings) if _names(words, key)), key=len, default="")
            problems.append({"key": dotted or named, "words": words})
    return problems


def _key(settings: Mapping[str, Any], model: str, location: tuple[int | str, ...]) -> str:
    """Return the dotted key of an error in a section, which pydantic names only by model (`DeepSpeedZeroConfig`)."""
    names, stem = [str(part) for part in location], model.lower().removeprefix("deepspeed").removesuffix("config")
    holders = [
        section for section, part in settings.items() if isinstance(part, Mapping) and names and names[0] in part
    ]
    own = [section for section in holders if stem in section.replace("_", "")] or holders
    return ".".join([*own[:1], *names])


def _keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys, the deepest first."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
    yield from (f"{prefix}{name}" for name in settings)


def _names(words: str, dotted: str) -> bool:
    return dotted.rpartition(".")[2].lower() in words.lower().replace(" ", "_")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints to stdout
        result = problems_of(json.load(sys.stdin))
    print(json.dumps(result))
