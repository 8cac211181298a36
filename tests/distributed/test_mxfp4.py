"""Weights in MXFP4, as OpenAI's gpt-oss come, train as the same model in bfloat16 does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.families import build_family
from tests.family_runs import Road, travel, weights


def packed(shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random blocks of 32 numbers and their scales for experts of `shape` (experts, in, out), as OpenAI's files have them."""
    experts, width, out = shape
    draw = torch.Generator().manual_seed(out)
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8, generator=draw)
    return blocks, torch.randint(114, 119, (experts, out, width // 32), dtype=torch.uint8, generator=draw)


def build_both(plain: Path, mxfp4: Path) -> None:
    """Writes one model twice, its experts in bfloat16 and in MXFP4."""
    for folder in (plain, mxfp4):
        build_family(folder, "gpt_oss", dtype="bfloat16")
    kept = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    files = dict(kept)
    for name in [name for name in kept if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = packed(kept[name].shape)
        kept[name] = convert_moe_packed_tensors(blocks, scales)
        del files[name]
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(files, mxfp4 / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((mxfp4 / "config.json").read_text())
    (mxfp4 / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))


def test_it_is_planned_trained_merged_and_asked_as_in_bfloat16(tmp_path: Path) -> None:
    found: list[Road] = []
    build_both(tmp_path / "plain" / "base", tmp_path / "mxfp4" / "base")
    for name in ("plain", "mxfp4"):
        road = travel("gpt_oss", "lora", tmp_path / name, tmp_path / "cache")
        assert not road.refused, f"{name}, {road.at}: {road.refused}"
        found.append(road)
    plain, mxfp4 = found
    assert plain.plan and mxfp4.plan and mxfp4.plan.ranks[0].peak_bytes == plain.plan.ranks[0].peak_bytes
    assert plain.trained and mxfp4.trained
    wanted, adapters = weights(plain.trained), weights(mxfp4.trained)
    assert adapters.keys() == wanted.keys() and all(torch.equal(adapters[name], wanted[name]) for name in wanted)
    merged = [weights(tmp_path / name / "merged-lora") for name in ("plain", "mxfp4")]
    assert merged[0].keys() == merged[1].keys() and all(torch.equal(merged[1][name], merged[0][name]) for name in merged[0])
