"""Reads which configuration keys the installed DeepSpeed knows, rejects and renames, and writes them as a table kept in
git.

`python scripts/render_deepspeed_keys.py` after each change of the DeepSpeed pin. `launch.deepspeed` checks a user's
JSON with the table, without importing DeepSpeed; `tests/contract/test_rendered_files.py` notices drift.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import typing
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

TABLE = Path(__file__).parent.parent / "sft_play" / "launch" / "deepspeed_keys.json"


def kind(annotation: Any) -> str:
    """Return the JSON type of a pydantic field: bool, int, number, string, object or any."""
    options = [a for a in typing.get_args(annotation) or (annotation,) if a is not type(None)]
    for option in options:
        if isinstance(option, type):
            for base, name in ((bool, "bool"), (int, "int"), (float, "number"), (str, "string")):
                if issubclass(option, base):
                    return name
            if hasattr(option, "model_fields"):
                return "object"
    return "any"


def fields(model: Any) -> dict[str, str]:
    """Return every accepted spelling of a model's keys with its type."""
    found = {}
    for name, field in model.model_fields.items():
        found[name] = kind(field.annotation)
        if field.alias:
            found[field.alias] = found[name]
    return dict(sorted(found.items()))


def table() -> dict[str, Any]:
    """Return the table: removed keys with DeepSpeed's reason, and the keys of each section that forbids unknown
    ones.
    """
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    removed = dict(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{key}": text for key, text in config._REMOVED_ZERO_CONFIG_KEYS.items()}
    return {
        "deepspeed": importlib.metadata.version("deepspeed"),
        "removed": {key: text.split(" See https")[0].strip() for key, text in sorted(removed.items())},
        "sections": {
            "bf16": fields(DeepSpeedBF16Config),
            "fp16": fields(DeepSpeedFP16Config),
            "zero_optimization": fields(DeepSpeedZeroConfig),
            "zero_optimization.offload_optimizer": fields(DeepSpeedZeroOffloadOptimizerConfig),
            "zero_optimization.offload_param": fields(DeepSpeedZeroOffloadParamConfig),
        },
    }


def main() -> int:
    from sft_play.files import write_json

    write_json(TABLE, table())
    print(TABLE.relative_to(Path.cwd()) if TABLE.is_relative_to(Path.cwd()) else TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
