"""The trace at real sizes: presets by formula and by trace, few layers for all, and the time it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.render_presets import QUOTED
from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.load import load_config
from sft_play.plan.architecture import architecture_of, end_tracer, shape_of
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.memory import rank_memory
from sft_play.plan.plan import LaunchRequest, setup_of
from sft_play.plan.sources import MADE_FOR, TracedMemory
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
    name: str, where: str, words: list[str], tmp_path: Path
) -> None:
    call = parse_call(["plan", f"CONFIG=configs/{name}.yaml", *words], COMMANDS)
    loaded, hardware = load_config(ROOT / "configs" / f"{name}.yaml", call.overrides, {}), parse_hardware(where)
    shape = shape_of(loaded.config.model)
    request = LaunchRequest(command_strategy="auto" if len(hardware.devices) > 1 else "single")
    plan = planned(loaded, hardware, request)
    memory = TracedMemory(
        config=loaded.config, architecture=architecture_of(loaded.config.model), cache_folder=tmp_path, traces=True
    )
    setup, micros = setup_of(plan), {rank.micro_batch for rank in plan.ranks}
    assert memory.observe(shape, setup, sorted(micros)), memory.error
    for rows in micros:
        exact, formula = memory(loaded.config, shape, setup, rows), rank_memory(loaded.config, shape, setup, rows)
        assert allocated(formula) == pytest.approx(allocated(exact), rel=0.05)
        assert formula["optimizer"] == pytest.approx(exact["optimizer"], rel=0.01)


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
