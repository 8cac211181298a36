"""The files in accelerate_configs/ and deepspeed/ are what the code renders, and what accelerate and DeepSpeed read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scripts.render_launch_files import KEPT, kept_files
from sft_play.launch.deepspeed import REMOVED
from tests.documents import ROOT

pytestmark = pytest.mark.slow


def test_committed_files_are_up_to_date_and_there_are_no_others() -> None:
    folders = (ROOT / "accelerate_configs", ROOT / "deepspeed")
    paths = [path for folder in folders for path in folder.iterdir() if path.name not in ("local.yaml", "README.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    assert texts == kept_files(), "run `make render`"


LIBRARIES = """
import json, os, sys
from pathlib import Path
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
result = {}
for file in sorted(Path("accelerate_configs").glob("*.yaml")):
    if file.name != "local.yaml":
        config = load_config_from_file(str(file))
        version = config.fsdp_config.get("fsdp_version")
        result[file.stem] = [config.distributed_type.value, config.num_processes, config.mixed_precision, version]
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from sft_play.launch.deepspeed import batch_numbers, deepspeed_settings
for stage in (1, 2, 3):
    settings = deepspeed_settings(stage=stage, device="cpu", precision="fp32", clipping=1.0, hidden_size=64,
                                  batch=batch_numbers(micro_batch=2, accumulation=4, world_size=1), offload=stage == 3)
    config = DeepSpeedConfig(settings)
    assert config.zero_optimization_stage == stage and config.train_batch_size == 8, stage
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS
print(json.dumps({"accelerate": result, "removed": sorted(_REMOVED_TOP_LEVEL_CONFIG_KEYS)}))
"""


def test_the_libraries_read_them_and_removed_keys_are_known() -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    shown = subprocess.check_output(
        [sys.executable, "-c", LIBRARIES], cwd=ROOT, env=environment, text=True, timeout=240
    )
    settings = json.loads(shown.splitlines()[-1])
    assert set(settings["accelerate"]) == set(KEPT)
    assert settings["accelerate"]["cpu_ddp"] == ["MULTI_GPU", 2, "no", None]
    assert settings["accelerate"]["fsdp2"] == ["FSDP", 2, "bf16", 2]
    assert settings["accelerate"]["zero3_offload"][0] == "DEEPSPEED"
    assert set(settings["removed"]) == REMOVED
