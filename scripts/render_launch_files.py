"""Write the accelerate and DeepSpeed files that are kept in git, in `accelerate_configs/` and `deepspeed/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sft_play.config.yaml_files import dump_yaml  # noqa: E402
from sft_play.files import write_text  # noqa: E402
from sft_play.launch.deepspeed import deepspeed_settings  # noqa: E402
from sft_play.launch.environment import Node  # noqa: E402
from sft_play.launch.settings import accelerate_settings  # noqa: E402
from sft_play.plan.plan import Precision, Strategy  # noqa: E402

HEADER = "# Rendered by `python scripts/render_launch_files.py`; do not edit.\n"
KEPT: Mapping[str, tuple[Strategy, str, Precision, str | None]] = {
    "cpu_single": ("single", "cpu", "fp32", None),
    "cpu_ddp": ("ddp", "cpu", "fp32", None),
    "cpu_fsdp2": ("fsdp2", "cpu", "fp32", None),
    "cpu_zero2": ("zero2", "cpu", "fp32", "cpu_zero2"),
    "ddp": ("ddp", "cuda", "bf16", None),
    "fsdp2": ("fsdp2", "cuda", "bf16", None),
    "zero1": ("zero1", "cuda", "bf16", "zero1"),
    "zero2": ("zero2", "cuda", "bf16", "zero2"),
    "zero3": ("zero3", "cuda", "bf16", "zero3"),
    "zero3_offload": ("zero3", "cuda", "bf16", "zero3_offload"),
}
"""Files kept in git: name -> strategy, device, precision, DeepSpeed file."""


def kept_files() -> dict[str, str]:
    """Return path in the repository -> content, for two processes on one machine; `auto` is replaced at run time."""
    files = {}
    for name, (strategy, device, precision, deepspeed) in KEPT.items():
        settings = accelerate_settings(
            strategy=strategy,
            device=device,
            precision=precision,
            processes=1 if strategy == "single" else 2,
            node=Node(),
            deepspeed_file=Path("deepspeed", f"{deepspeed}.json") if deepspeed else None,
        )
        files[f"accelerate_configs/{name}.yaml"] = HEADER + dump_yaml(settings)
        if deepspeed:
            stage = {"zero1": 1, "zero2": 2, "zero3": 3}[strategy]
            content = deepspeed_settings(
                stage=stage,
                device=device,
                precision="fp32" if device == "cpu" else None,
                batch=None,
                clipping=None,
                offload=name.endswith("offload"),
            )
            files[f"deepspeed/{deepspeed}.json"] = json.dumps(content, indent=2) + "\n"
    return files


if __name__ == "__main__":
    for path, content in kept_files().items():
        write_text(ROOT / path, content)
        print(path)
