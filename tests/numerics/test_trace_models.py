"""The trace at real sizes: presets by formula and by trace, few layers for all, and the time it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from scripts.render_presets import MADE_FOR, QUOTED
from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.load import load_config
from sft_play.plan.architecture import architecture_of, end_tracer, shape_of
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.memory import rank_memory
from sft_play.plan.plan import LaunchRequest, setup_of
from sft_play.plan.sources import TracedMemory
from tests.conftest import ROOT, Program
from tests.plans import planned
from tests.processor_time import importing, seconds_of

pytestmark = pytest.mark.broad

PRESETS = {name: hardware for name, hardware in MADE_FOR.items() if name in QUOTED or name in ("run_bnb", "smoke")} | {
    "quickstart": "cpu"
}
"""All presets but `run_unsloth`, whose own kernels cannot be traced, and `from_scratch`."""
FULL = ["TUNING_MODE=full", "TRAIN_GRADIENT_CHECKPOINTING=true"]
OTHERWISE = {"home_lan_13b": ["LAUNCH_STRATEGY=fsdp2", "LAUNCH_SLOW_NETWORK=allow"]}
"""Stages are not traced."""
CASES = [
    *(pytest.param(name, hardware, OTHERWISE.get(name, []), id=name) for name, hardware in PRESETS.items()),
    pytest.param("run_bnb", "H200", [*FULL, "TRAIN_BATCH_SIZE=1"], id="full, autocast, checkpointing, 1 row"),
    pytest.param("run_bnb", "B200", [*FULL, "TRAIN_BATCH_SIZE=16"], id="full, autocast, checkpointing, 16 rows"),
    pytest.param("run_bnb", "B200", [*FULL, "TRAIN_BATCH_SIZE=1", "TRAIN_OPTIM=muon"], id="full, Muon"),
    *(
        pytest.param(
            "run_bnb",
            "H100",
            [f"TUNING_MODE={mode}", "TRAIN_ACTIVATION_OFFLOAD=on", "TRAIN_BATCH_SIZE=1", "MODEL_MAX_SEQ_LEN=8192"],
            id=f"{mode}, inputs on the host",
        )
        for mode in ("lora", "qlora")
    ),
    pytest.param("run_bnb", "B200", [*FULL, "TRAIN_ACTIVATION_OFFLOAD=on"], id="full, inputs on the host"),
    pytest.param("run_bnb", "2xH200", ["TUNING_MODE=lora", "LAUNCH_TENSOR_PARALLEL=2"], id="LoRA, slices of layers"),
    pytest.param(
        "run_bnb", "2xH200", [*FULL, "TRAIN_BATCH_SIZE=1", "LAUNCH_TENSOR_PARALLEL=2"], id="full, slices of layers"
    ),
]
NOT_ALLOCATED = ("context", "fragmentation", "free")


@pytest.fixture(scope="module", autouse=True)
def one_tracer() -> Iterator[None]:
    yield
    end_tracer()


def allocated(parts: dict[str, int]) -> int:
    return sum(size for name, size in parts.items() if name not in NOT_ALLOCATED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where", "words"), CASES)
def test_the_formula_is_within_5_percent_of_the_trace_on_every_preset(
    name: str, where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    call = parse_call(["plan", f"CONFIG=configs/{name}.yaml", *words], COMMANDS)
    loaded, hardware = load_config(ROOT / "configs" / f"{name}.yaml", call.overrides, {}), parse_hardware(where)
    shape = shape_of(loaded.config.model)
    request = LaunchRequest(command_strategy="auto" if len(hardware.devices) > 1 else "single")
    plan = planned(loaded, hardware, request)
    memory = TracedMemory(config=loaded.config, architecture=architecture_of(loaded.config.model), traces=True)
    setup, micros = setup_of(plan), {rank.micro_batch for rank in plan.ranks}
    assert memory.observe(shape, setup, sorted(micros)), memory.error
    for rows in micros:
        exact, formula = memory(loaded.config, shape, setup, rows), rank_memory(loaded.config, shape, setup, rows)
        assert allocated(formula) == pytest.approx(allocated(exact), rel=0.05)
        assert formula["optimizer"] == pytest.approx(exact["optimizer"], rel=0.01)


SIZES = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000},
    "qwen2": {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 152_064, "tie_word_embeddings": True},
    "granite": {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000},
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 152_064},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_144,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    },
}
ROWS = 'DATA_NEW_TOKENS=["<a>", "<b>"]'
RECOMPUTED = "TRAIN_GRADIENT_CHECKPOINTING=true"
SHAPES = {
    "LoRA": [],
    "DoRA": ["TUNING_LORA_VARIANT=dora"],
    "DoRA, recomputed": ["TUNING_LORA_VARIANT=dora", RECOMPUTED],
    "DoRA over nf4, recomputed": ["TUNING_MODE=qlora", "TUNING_LORA_VARIANT=dora", RECOMPUTED],
    "rsLoRA, PiSSA": ["TUNING_LORA_RSLORA=true", "TUNING_LORA_INIT=pissa", RECOMPUTED],
    "ranks, biases": ["TUNING_LORA_RANK_PATTERN={down_proj: 64, q_proj: 128}", "TUNING_LORA_BIAS=all"],
    "a saved embedding": ["TUNING_LORA_MODULES_TO_SAVE=[embed_tokens]"],
    "new rows": [ROWS],
    "new rows, recomputed": [ROWS, RECOMPUTED],
    "all rows": [ROWS, "TUNING_LORA_EMBEDDINGS=all"],
    "all rows, recomputed": [ROWS, "TUNING_LORA_EMBEDDINGS=all", RECOMPUTED],
    "inputs on the host": ["TRAIN_ACTIVATION_OFFLOAD=on"],
    "full": ["TUNING_MODE=full"],
    "full, inputs on the host": ["TUNING_MODE=full", "TRAIN_ACTIVATION_OFFLOAD=on"],
    "Muon": ["TUNING_MODE=full", "TRAIN_OPTIM=muon"],
    "smoothed": ["TRAIN_LABEL_SMOOTHING_FACTOR=0.1"],
    "DFT, recomputed": ["TRAIN_LOSS=dft", RECOMPUTED],
    "NEFTune": ["TRAIN_NEFTUNE_NOISE_ALPHA=5"],
    "full, recomputed": ["TUNING_MODE=full", RECOMPUTED],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text"])
def test_parts_by_formula_are_within_1_percent_of_the_trace(
    kind: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    _compare_parts(kind, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "new rows", "DoRA, recomputed", "full", "full, recomputed"])
@pytest.mark.parametrize("kind", ["granite", "qwen3"])
def test_parts_with_ligers_kernels_are_within_1_percent_too(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    _compare_parts(kind, SHAPES[name], tmp_path, kernels="liger")


def _compare_parts(kind: str, words: list[str], tmp_path: Path, kernels: Literal["off", "liger"] = "off") -> None:
    """Parts of under 0.5 % of all memory, such as scales of nf4, may differ by so much of it."""
    architecture = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "model_type": kind}
    architecture |= {"max_position_embeddings": 8192, "tie_word_embeddings": False} | SIZES[kind]
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    defaults = ["TRAIN_BATCH_SIZE=2", "MODEL_MAX_SEQ_LEN=1024", f"MODEL_NAME={tmp_path}"]
    defaults += [] if words and "MODE" in words[0] else ["TUNING_MODE=lora"]
    free = RECOMPUTED in words or any("OFFLOAD" in word for word in words)
    defaults += [] if free else ["TRAIN_GRADIENT_CHECKPOINTING=false"]
    call = parse_call(["plan", "CONFIG=configs/run_bnb.yaml", *defaults, *words], COMMANDS)
    loaded = load_config(ROOT / "configs" / "run_bnb.yaml", call.overrides, {})
    shape, setup = shape_of(loaded.config.model), replace(setup_of(planned(loaded, "H200")), kernels=kernels)
    memory = TracedMemory(config=loaded.config, architecture=architecture, traces=True)
    assert memory.observe(shape, setup, [2]), memory.error
    exact, formula = memory(loaded.config, shape, setup, 2), rank_memory(loaded.config, shape, setup, 2)
    for part in (exact.keys() | formula.keys()) - set(NOT_ALLOCATED):
        small = 0.005 * allocated(exact)
        assert formula.get(part, 0) == pytest.approx(exact.get(part, 0), rel=0.01, abs=small), part
    assert allocated(formula) == pytest.approx(allocated(exact), rel=0.01)


@pytest.mark.quiet
@pytest.mark.slow
def test_a_model_of_70_billion_is_traced_in_little_time_and_known_in_less(program: Program, tmp_path: Path) -> None:
    """Compare processor time with that of the imports of a trace; a cached result needs no torch."""
    words = ["plan", "CONFIG=configs/h200_quad.yaml", "HARDWARE=4xH200", "JSON=1"]
    env = {"SFT_PLAY_CACHE": str(tmp_path)}
    traced, first = seconds_of(lambda: program(*words, "SOURCE=trace", env=env))
    cached, again = seconds_of(lambda: program(*words, env=env))
    reference = importing("peft")
    assert first.code == 0 and first.json["source"] == "trace", first.err
    assert traced < 5 * reference and cached < reference / 4, (traced, cached, reference)
    assert again.json["ranks"] == first.json["ranks"] and again.json["source"] == "trace"
