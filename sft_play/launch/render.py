"""Renders a run's `accelerate.yaml`, and such files for people in `accelerate_configs/` and `deepspeed/`. Pure but for `main`.

`python -m sft_play.launch.render` (part of `make render`) writes the files that are kept in git; a test compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.files import write_text
from sft_play.launch.deepspeed_json import deepspeed_settings
from sft_play.launch.environment import Node
from sft_play.plan.plan import Plan, Precision, Strategy

HEADER = "# Rendered by `python -m sft_play.launch.render`; do not edit."
DISTRIBUTED_TYPE: Mapping[Strategy, str] = {
    "single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED",
}  # fmt: skip
MIXED_PRECISION: Mapping[Precision, str] = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate_settings(
    *, strategy: Strategy, device: str, precision: Precision, processes: int, node: Node, deepspeed_file: Path | None
) -> dict[str, Any]:
    """Returns the content of an accelerate config file for `processes` in all over `node.count` machines.

    `MULTI_GPU` on a CPU is no slip: with `MULTI_CPU` or `use_cpu` accelerate starts one process; the workers' environment
    says what the device is.
    """
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DISTRIBUTED_TYPE[strategy],
        "num_machines": node.count,
        "num_processes": processes,
        "machine_rank": node.rank if node.count == 1 else 0,
        "use_cpu": device == "cpu" and strategy == "single",
        "main_training_function": "main",
        "debug": False,
    }
    if node.count > 1:
        settings |= {"main_process_ip": node.master_address, "rdzv_backend": "static", "same_network": True}
    if processes > 1 and node.master_port:
        settings["main_process_port"] = node.master_port
    if strategy.startswith("zero"):
        assert deepspeed_file is not None, "ZeRO needs a DeepSpeed file"
        # Precision, stage and offload stand in that file; accelerate refuses them in both. Its own default launcher is pdsh.
        settings["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed_file),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": strategy == "zero3",
        }
        return settings
    settings["mixed_precision"] = MIXED_PRECISION[precision]
    if strategy == "fsdp2":
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
            # Recomputation is the trainer's own, one switch for every strategy.
            "fsdp_activation_checkpointing": False,
        }
    return settings


def accelerate_yaml(plan: Plan, node: Node, *, deepspeed_file: Path | None, fsdp: Mapping[str, Any]) -> str:
    """Returns the text of a run's `accelerate.yaml`; `fsdp` holds what a user's own accelerate config says differently."""
    settings = accelerate_settings(
        strategy=plan.strategy,
        device=plan.device,
        precision=plan.precision,
        processes=plan.world_size,
        node=node,
        deepspeed_file=deepspeed_file,
    )
    if plan.strategy == "fsdp2":
        settings["fsdp_config"] |= fsdp
    return to_yaml(settings, "# Rendered by SFT-Play for this run; `accelerate launch --config_file` reads it.")


def to_yaml(settings: Mapping[str, Any], header: str) -> str:
    """Returns nested mappings of scalars as YAML. Strings are quoted, since YAML 1.1 reads a bare `no` as false."""

    def lines(part: Mapping[str, Any], indent: str) -> list[str]:
        out = []
        for key, value in part.items():
            if isinstance(value, Mapping):
                out += [f"{indent}{key}:", *lines(value, indent + "  ")]
            else:
                out.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
        return out

    return "\n".join([header, *lines(settings, ""), ""])


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
    """Returns path in the repository -> content of each file: two processes on one machine; we or transformers fill `auto` in."""
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
        files[f"accelerate_configs/{name}.yaml"] = to_yaml(settings, HEADER)
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


def main() -> int:
    """Writes the kept files into the working folder, which must be the repository."""
    for path, content in kept_files().items():
        write_text(Path(path), content)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
