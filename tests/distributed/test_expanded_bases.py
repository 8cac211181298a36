"""Weights in MXFP4, as in OpenAI's gpt-oss, and in FP8, as in DeepSeek V3, train like the same model in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft_play.config.schema import ModelConfig
from sft_play.model.resolve import resolve_model
from tests.families import build_family
from tests.family_runs import Road, travel, weights


def packed(shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks of 32 numbers and their scales for experts of `shape` (experts, in, out), as OpenAI's files
    have them.
    """
    experts, width, out = shape
    draw = torch.Generator().manual_seed(out)
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8, generator=draw)
    return blocks, torch.randint(114, 119, (experts, out, width // 32), dtype=torch.uint8, generator=draw)


def build_both(plain: Path, mxfp4: Path) -> None:
    """Write one model twice, its experts in bfloat16 and in MXFP4."""
    for folder in (plain, mxfp4):
        build_family(folder, "gpt_oss", dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    files = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = packed(tensors[name].shape)
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
        del files[name]
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(files, mxfp4 / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((mxfp4 / "config.json").read_text())
    (mxfp4 / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))


@pytest.mark.broad
def test_an_mxfp4_base_is_planned_trained_merged_and_asked_as_in_bfloat16(tmp_path: Path) -> None:
    roads: list[Road] = []
    build_both(tmp_path / "plain" / "base", tmp_path / "mxfp4" / "base")
    for name in ("plain", "mxfp4"):
        road = travel("gpt_oss", "lora", tmp_path / name, tmp_path / "cache")
        assert not road.refused, f"{name}, {road.at}: {road.refused}"
        roads.append(road)
    plain, mxfp4 = roads
    assert plain.plan and mxfp4.plan and mxfp4.plan.ranks[0].peak_bytes == plain.plan.ranks[0].peak_bytes
    assert plain.trained and mxfp4.trained
    expected, adapters = weights(plain.trained), weights(mxfp4.trained)
    assert adapters.keys() == expected.keys() and all(torch.equal(adapters[name], expected[name]) for name in expected)
    merged = [weights(tmp_path / name / "merged-lora") for name in ("plain", "mxfp4")]
    assert merged[0].keys() == merged[1].keys() and all(
        torch.equal(merged[1][name], merged[0][name]) for name in merged[0]
    )


def build_fp8(folder: Path, family: str, block: tuple[int, int], scale: str = "weight_scale_inv") -> None:
    """Write a model whose linear layers are in FP8, each block of `block` numbers with a scale."""
    build_family(folder, family, dtype="bfloat16")
    files = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        files[name] = tensor.bfloat16()
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // most) for size, most in zip(tensor.shape, block, strict=True))
        scales = 0.002 + 0.01 * torch.rand(rows, columns)
        whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
            : tensor.shape[0], : tensor.shape[1]
        ]
        files[name] = (tensor / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        files[name.replace("weight", scale)] = scales
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize(
    ("family", "scale"), [("llama", "weight_scale_inv"), ("glm4_moe", "weight_scale_inv"), ("llama", "scale")]
)
def test_fp8_is_expanded_to_what_transformers_makes_of_it(
    family: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    build_fp8(tmp_path / "fp8", family, (32, 16), scale)
    expanded = Path(resolve_model(ModelConfig(name=str(tmp_path / "fp8"))).path)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (expanded, tmp_path / "fp8")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    assert "quantization_config" not in json.loads((expanded / "config.json").read_text())


def test_a_block_that_is_cut_has_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V3's 576 rows in blocks of 128."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    build_fp8(tmp_path / "fp8", "llama", (48, 128))
    files = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    expanded = Path(resolve_model(ModelConfig(name=str(tmp_path / "fp8"))).path)
    scales = files[f"{name}_scale_inv"]
    assert scales.shape == (2, 1)
    whole = torch.cat([files[name][:48].float() * scales[0], files[name][48:].float() * scales[1]]).bfloat16()
    assert torch.equal(weights(expanded)[name], whole)


@pytest.mark.parametrize("mode", ["lora", "full", "qlora"])
def test_a_base_in_fp8_trains_merges_and_answers(mode: str, tmp_path: Path) -> None:
    build_fp8(tmp_path / "base", "llama", (32, 32))
    road = travel("llama", mode, tmp_path, tmp_path / "cache")
    assert not road.refused, f"{road.at}: {road.refused}"
