"""The plan of a call without launching: what `make plan` and `make memory-check` show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.load import LoadedConfig
from sft_play.config.sources import PRESETS
from sft_play.errors import HardwareError
from sft_play.plan.calibration import load_calibration
from sft_play.plan.detect import detect
from sft_play.plan.fit import DoesNotFitError, Memory
from sft_play.plan.hardware import Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from sft_play.plan.sources import Source, planned
from sft_play.runs.prepared import Prepared, lookup

if TYPE_CHECKING:
    from sft_play.config.call import Call

LAN = "12GB+8GB+8GB@1Gbit"
MADE_FOR = {
    "run_bnb": "24GB", "run_unsloth": "24GB", "rtx4090_sli": "2xRTX4090", "a100_pair": "2xA100", "h100_pair": "2xH100",
    "h200_pair": "2xH200", "h200_quad": "4xH200", "l40s_single": "L40S", "l40s_pair": "2xL40S", "home_lan": LAN, "home_lan_13b": LAN,
    "smoke": "8GB+8GB@1Gbit", "from_scratch": "24GB", "run_bnb_qwen3_5": "16GB", "rtx4090_sli_gemma4": "2xRTX4090",
    "home_lan_smollm3": LAN, "h200_pair_gemma4": "2xH200", "h200_single_gpt_oss": "H200",
}  # fmt: skip
"""Preset -> the hardware that it is for, as docs/presets.md has it."""


def hardware_of(call: Call) -> Hardware:
    """Returns the hardware that `HARDWARE` describes, else this machine's. Raises `HardwareError`."""
    described = call.options.get("HARDWARE")
    return parse_hardware(described) if described else detect()


def explained(loaded: LoadedConfig, hardware: Hardware, error: HardwareError) -> HardwareError:
    """Returns the refusal of a plan with where the key that it names was written.

    One of too little memory here gets the hardware that the preset is for: the file itself, or one that it extends.
    """
    if error.place and error.place in loaded.origins:
        error.place = loaded.origins[error.place]
    if hardware.described or not isinstance(error, DoesNotFitError):
        return error
    files = [str(loaded.path), *(loaded.origins[key].rpartition(":")[0] for key in ("model.name", *loaded.origins))]
    presets = (file for file in map(Path, files) if file.stem in MADE_FOR and file.resolve().parent == PRESETS)
    name = next((file.stem for file in presets), None)
    if name is None:
        return error
    return error.with_remedies(notes=(f"the preset `{name}` is for HARDWARE={MADE_FOR[name]}, which `make plan` plans for",))


def plan_for(
    loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest, prepared: Prepared | None = None, source: Source = "known"
) -> Plan:
    """Returns the plan with what is known of the data: `prepared`, or what an earlier preparation found. Raises `UserError`."""
    config = loaded.config
    known, shape, calibration = prepared or lookup(config), shape_of(config.model), load_calibration(hardware)

    def make(memory: Memory) -> Plan:
        return make_plan(
            config, loaded.typed, hardware, shape, launch=request, prepared=known, calibration=calibration, memory=memory
        )  # fmt: skip

    try:
        return planned(make, config, shape, known, source)
    except HardwareError as error:
        raise explained(loaded, hardware, error) from None


def needs_several(loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest) -> bool:
    """Whether a run would be more than one process: several GPUs, or something that was asked for."""
    asked = (request.num_gpus or 1) > 1 or request.num_nodes > 1 or loaded.config.launch.strategy != "auto"
    return asked or (hardware.kind == "cuda" and len(hardware.devices) > 1 and request.num_gpus != 1)
