"""Liger's kernels go where the plan says: into every norm and feed-forward part of each family, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sft_play.plan.shape import LIGER_MODEL_TYPES

ROAD = """
import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING
from sft_play.model.load import use_kernels
from sft_play.plan.shape import LIGER_MODEL_TYPES
small = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=99, pad_token_id=0,
)
for family in sorted(LIGER_MODEL_TYPES):
    for act in ("gelu", "silu"):  # Liger replaces the family's classes too
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**small, hidden_act=act))
        forward, names = type(model).forward, list(model.state_dict())
        use_kernels(model)
        kinds = {"norm": set(), "mlp": set()}
        for name, module in model.named_modules():
            kind = name.rsplit(".", 1)[-1]
            if "norm" in kind or kind == "mlp":
                kinds["mlp" if kind == "mlp" else "norm"].add(module.forward.__func__.__module__.split(".")[0])
        rope = sys.modules[type(model).__module__].apply_rotary_pos_emb.__module__.split(".")[0]
        assert model.forward.__func__ is forward and list(model.state_dict()) == names
        print(family, act, *sorted(kinds["norm"]), *sorted(kinds["mlp"]), rope)
"""


MEMORY = """
import contextlib
from dataclasses import replace
from liger_kernel.ops import rms_norm, rope, swiglu
from sft_play.model.load import use_kernels
from sft_play.trace import build
from sft_play.trace.run import observe
from tests.families import tiny_config
from tests.numerics.test_trace import MODES, PLAIN

class Nothing:
    def __getitem__(self, grid):
        return lambda *arguments, **named: None

for module in (rms_norm, rope, swiglu):
    for name in dir(module):
        if "_kernel" in name or name == "_triton_rope":
            setattr(module, name, Nothing())
    module.device_context = lambda device: contextlib.nullcontext()
wide = dict(hidden_size=256, intermediate_size=704, head_dim=32, num_attention_heads=8)
standins = build.fuse_like_liger
for family in ("llama", "granite", "qwen3"):
    for mode in ("full autocast", "full bf16", "lora bf16", "lora bf16, fp32 adapters", "nf4"):
        for recomputes in (False, True):
            case = replace(PLAIN, architecture=tiny_config(family, **wide).to_dict(), **MODES[mode])
            case = replace(case, kernels="liger", gradient_checkpointing=recomputes)
            build.fuse_like_liger = standins
            standing_in = observe(case, build.model_of(case))
            build.fuse_like_liger = use_kernels
            real = observe(case, build.model_of(case))
            most, same = (
                max(peak.total for operations in places.values() for peak in operations.values())
                for places in (real, standing_in)
            )
            assert most == same, (family, mode, recomputes, most, same)
"""


def test_a_traced_step_takes_what_ligers_functions_take() -> None:
    """Kernels that do nothing stand in, in a separate process: Liger replaces rotary embeddings for good."""
    pytest.importorskip("liger_kernel", reason="the package liger-kernel is not installed")
    pytest.importorskip("triton", reason="the package triton is not installed")
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_every_norm_and_feed_forward_part_is_replaced_and_nothing_else() -> None:
    pytest.importorskip("liger_kernel", reason="the package liger-kernel is not installed")
    pytest.importorskip("triton", reason="the package triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + ROAD], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines()}
    for family in LIGER_MODEL_TYPES:
        assert seen[family, "silu"] == ["liger_kernel"] * 3, family
        assert seen[family, "gelu"] == ["liger_kernel", "transformers", "liger_kernel"], family
