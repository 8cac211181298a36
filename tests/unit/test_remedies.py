"""Ways to need less memory: what each promises is what its override gives when it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.command_line import parse_call
from sft_play.errors import UserError
from sft_play.launch.job import read_options
from sft_play.plan.hardware import GIB
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.plan.request import DoesNotFitError, Remedy
from tests import plans
from tests.conftest import ROOT

OFFLOADED = LaunchRequest(command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)


def planned(config: Path, hardware: str, typed: list[str], launch: LaunchRequest) -> Plan:
    return plans.planned(parse_call(["plan", f"CONFIG={config}", *typed], COMMANDS).load_config(), hardware, launch)


def outcome(config: Path, hardware: str, typed: list[str], launch: LaunchRequest) -> tuple[bool, int]:
    """Returns whether it fits, and the bytes that it needs."""
    try:
        plan = planned(config, hardware, typed, launch)
    except DoesNotFitError as error:
        return False, sum(error.parts.values())
    return True, max(rank.peak_bytes for rank in plan.ranks)


def as_typed(remedy: Remedy, typed: list[str], launch: LaunchRequest) -> tuple[list[str], LaunchRequest]:
    words = [word for word in remedy.override.split() if "=" in word and not word.startswith("DEEPSPEED_CONFIG")]
    names = {word.partition("=")[0] for word in words}
    if "train-deepspeed" in remedy.override:
        launch = OFFLOADED
    elif "train-fsdp" in remedy.override:
        launch = LaunchRequest(command_strategy="fsdp2")
    return [word for word in typed if word.partition("=")[0] not in names] + words, launch


CASES: dict[str, tuple[str, str, list[str], LaunchRequest]] = {
    "full on one card": ("run_bnb", "24GB", ["TUNING_MODE=full"], LaunchRequest()),
    "recomputation typed off": ("run_bnb", "24GB", ["TRAIN_BATCH_SIZE=4", "TRAIN_GRADIENT_CHECKPOINTING=false"], LaunchRequest()),
    "T4": ("run_bnb", "T4", ["TUNING_MODE=lora", "TRAIN_BATCH_SIZE=2"], LaunchRequest()),
    "accumulation": ("run_bnb", "12GB", ["TRAIN_GRAD_ACCUM=1"], LaunchRequest()),
    "replicas": ("run_bnb", "8x48GB", ["TUNING_MODE=full", "LAUNCH_STRATEGY=ddp"], LaunchRequest(command_strategy="auto")),
    "a slow network": ("run_bnb", "2x8GB@1Gbit", ["TUNING_MODE=lora"], LaunchRequest(command_strategy="auto")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_gives_what_it_promises(name: str) -> None:
    preset, hardware, typed, launch = CASES[name]
    config = ROOT / "configs" / f"{preset}.yaml"
    with pytest.raises(DoesNotFitError) as error:
        planned(config, hardware, typed, launch)
    assert error.value.remedies
    for remedy in error.value.remedies:
        words, request = as_typed(remedy, typed, launch)
        fits, _ = outcome(config, hardware, words, request)
        assert fits == remedy.fits, remedy.override
        if "=auto" in remedy.override:
            continue  # it takes as many rows as fit
        if not any(word.startswith(("TRAIN_BATCH_SIZE", "TRAIN_GRAD_ACCUM")) for word in words):
            words.append("TRAIN_BATCH_SIZE=1")  # the memory that is said is of the rows that did not fit
        assert outcome(config, hardware, words, request) == (remedy.fits, remedy.need_bytes), remedy.override


COMMANDS_OF = {"train": "single", "train-distributed": "auto", "train-deepspeed": "zero", "train-fsdp": "fsdp2"}


def typed_plan(command: str, words: list[str], hardware: str) -> Plan:
    """Returns the plan of a command line, read as training reads it."""
    call = parse_call([command, *words], COMMANDS)
    options, loaded = read_options(call, call.load_config(), COMMANDS_OF[command], rehearsal=True)  # type: ignore[arg-type]
    return plans.planned(loaded, hardware, options.request)


@pytest.mark.parametrize("hardware", ["8GB", "2x6GB"])
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_remedy_of_every_preset_is_taken_when_it_is_typed(preset: str, mode: str, hardware: str) -> None:
    command = "train-distributed"
    words = [f"CONFIG={preset}", f"TUNING_MODE={mode}"]
    try:
        typed_plan(command, words, hardware)
    except DoesNotFitError as error:
        found = error.remedies
    except UserError:
        return  # refused for another reason, as random weights and adapters are
    else:
        return
    for remedy in found:
        parts = remedy.override.split()
        other, more = (parts[1], parts[2:]) if parts[0] == "make" else (command, parts)
        names = {word.partition("=")[0] for word in more}
        try:
            typed_plan(other, [word for word in words if word.partition("=")[0] not in names] + more, hardware)
        except DoesNotFitError:
            assert not remedy.fits, remedy.override
        else:
            assert remedy.fits, remedy.override


def test_what_came_nearest_is_shown() -> None:
    config, launch = ROOT / "configs" / "run_bnb.yaml", LaunchRequest(command_strategy="auto")
    with pytest.raises(DoesNotFitError, match="with weights shared out by fsdp2; a whole replica needs") as error:
        planned(config, "8x20GB", ["TUNING_MODE=full"], launch)
    assert error.value.setup.strategy == "fsdp2" and error.value.need_bytes - error.value.capacity_bytes < 5 * GIB


def test_the_example_in_the_docs_is_what_the_plan_says() -> None:
    with pytest.raises(DoesNotFitError) as error:
        planned(ROOT / "configs" / "run_bnb.yaml", "24GB", ["TUNING_MODE=full"], LaunchRequest())
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert error.value.message.split(", gradients")[0] + ", ...)" in page
    assert "; ".join(map(str, error.value.remedies[:2])) in page
