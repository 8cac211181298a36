"""Layers 0 to 2 start without the heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes")
LIGHT_PACKAGES = ("config", "runs", "plan", "launch")


def light_modules() -> list[str]:
    found = ["sft_play.errors", "sft_play.files", "sft_play.__main__"]
    for package in LIGHT_PACKAGES:
        for path in sorted((ROOT / "sft_play" / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(name.removesuffix(".__init__"))
    return found


def test_importing_every_light_module_loads_no_heavy_package() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["deepspeed", "accelerate_configs", "configs", "examples"])
def test_top_level_folders_shadow_no_library(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()
