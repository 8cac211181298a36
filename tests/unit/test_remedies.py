"""Ways to need less memory: what each promises is what its override gives when it is typed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.plan.request import DoesNotFitError, Remedy
from sft_play.text import figure
from tests import plans
from tests.conftest import ROOT

ONE, AUTO = LaunchRequest(), LaunchRequest(command_strategy="auto")
OFFLOADED = LaunchRequest(command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)


def planned(preset: str, hardware: str, typed: list[str], launch: LaunchRequest) -> Plan:
    config = ROOT / "configs" / f"{preset}.yaml"
    return plans.planned(parse_call(["plan", f"CONFIG={config}", *typed], COMMANDS).load_config(), hardware, launch)


def outcome(*case: Any) -> tuple[bool, int]:
    """Return whether it fits, and the bytes that it needs."""
    try:
        return True, max(rank.peak_bytes for rank in planned(*case).ranks)
    except DoesNotFitError as error:
        return False, error.need_bytes


def as_typed(remedy: Remedy, typed: list[str], launch: LaunchRequest) -> tuple[list[str], LaunchRequest]:
    words = [word for word in remedy.variables.split() if not word.startswith("DEEPSPEED")]
    names = {word.partition("=")[0] for word in words}
    if remedy.command == "make train-deepspeed":
        launch = OFFLOADED
    elif remedy.command == "make train-fsdp":
        launch = LaunchRequest(command_strategy="fsdp2")
    return [word for word in typed if word.partition("=")[0] not in names] + words, launch


CASES: dict[str, tuple[str, str, list[str], LaunchRequest]] = {
    "full on one card": ("run_bnb", "24GB", ["TUNING_MODE=full"], ONE),
    "recomputation typed off": ("run_bnb", "24GB", ["TRAIN_BATCH_SIZE=4", "TRAIN_GRADIENT_CHECKPOINTING=false"], ONE),
    "T4": ("run_bnb", "T4", ["TUNING_MODE=lora", "TRAIN_BATCH_SIZE=2"], ONE),
    "accumulation": ("run_bnb", "12GB", ["TRAIN_GRAD_ACCUM=1"], ONE),
    "replicas": ("run_bnb", "8x48GB", ["TUNING_MODE=full", "LAUNCH_STRATEGY=ddp"], AUTO),
    "only two changes together": ("run_bnb", "4xT4", ["TUNING_MODE=full", "MODEL_MAX_SEQ_LEN=32768"], AUTO),
    "a slow network": ("run_bnb", "2x8GB@1Gbit", ["TUNING_MODE=lora"], AUTO),
}


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_gives_what_it_promises(name: str) -> None:
    preset, hardware, typed, launch = CASES[name]
    with pytest.raises(DoesNotFitError) as error:
        planned(preset, hardware, typed, launch)
    assert error.value.remedies
    for remedy in error.value.remedies:
        words, request = as_typed(remedy, typed, launch)
        assert outcome(preset, hardware, words, request)[0] == remedy.fits, str(remedy)
        if "=auto" in remedy.variables:
            continue  # it takes as many rows as fit
        if not any(word.startswith(("TRAIN_BATCH_SIZE", "TRAIN_GRAD_ACCUM")) for word in words):
            words.append("TRAIN_BATCH_SIZE=1")  # the memory that is said is of the rows that did not fit
        assert outcome(preset, hardware, words, request) == (remedy.fits, remedy.need_bytes), str(remedy)


def test_the_example_in_the_docs_matches_the_plan() -> None:
    with pytest.raises(DoesNotFitError) as error:
        planned("run_bnb", "24GB", ["TUNING_MODE=full"], ONE)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert error.value.message in page
    assert "\n      ".join(map(str, error.value.remedies[:2])) in page


def test_a_remedy_counts_the_machines_memory_and_does_not_fit_without_it() -> None:
    loaded = parse_call(
        ["plan", f"CONFIG={ROOT / 'configs' / 'run_bnb.yaml'}", "TUNING_MODE=full"], COMMANDS
    ).load_config()

    def offloading(hardware: Any) -> list[str]:
        with pytest.raises(DoesNotFitError) as error:
            plans.planned(loaded, hardware, ONE)
        return [str(remedy) for remedy in error.value.remedies if "offload" in remedy.variables]

    (unstated,) = offloading("24GB")
    enough = re.search(r"GiB of the machine's memory \(enough: HARDWARE=\.\.\.\+(\d+)GB-RAM\) with", unstated)
    assert enough
    stated = unstated.replace(f" (enough: HARDWARE=...+{enough[1]}GB-RAM)", "")
    assert offloading(plans.with_ram("24GB", int(enough[1]))) == [stated] and "too much" not in stated
    (short,) = offloading(plans.with_ram("24GB", 64))
    assert "of the machine's memory (51.2 of 64 may be used)" in short and short.endswith("still too much")


def test_rows_are_shortened_as_far_as_they_must_be() -> None:
    with pytest.raises(DoesNotFitError) as error:
        planned("run_bnb", "8GB", ["MODEL_MAX_SEQ_LEN=16384", "TRAIN_BATCH_SIZE=1"], ONE)
    [shorter] = [remedy for remedy in error.value.remedies if remedy.variables.startswith("MODEL_MAX_SEQ_LEN=")]
    assert shorter.fits and shorter.variables < "MODEL_MAX_SEQ_LEN=8192"


def test_two_changes_are_offered_as_one_where_no_single_one_fits() -> None:
    preset, hardware, typed, launch = CASES["only two changes together"]
    with pytest.raises(DoesNotFitError) as error:
        planned(preset, hardware, typed, launch)
    fitting = [remedy for remedy in error.value.remedies if remedy.fits]
    assert [remedy.variables for remedy in fitting] == ["TRAIN_ACTIVATION_OFFLOAD=on TUNING_MODE=lora"]
    assert error.value.render().partition("hint: ")[2].startswith(str(fitting[0]))


def test_a_narrow_optimizer_is_no_part_of_a_remedy_that_fits_without_it() -> None:
    with pytest.raises(DoesNotFitError) as error:
        planned("run_bnb", "H100", ["TUNING_MODE=full"], ONE)
    assert "MODEL_DTYPE=bfloat16" in [remedy.variables for remedy in error.value.remedies if remedy.fits]
    assert not any("TRAIN_OPTIM" in remedy.variables for remedy in error.value.remedies)


def test_a_remedy_says_that_it_recomputes() -> None:
    """So that less memory with `lora` than with `qlora`, which fits without, does not surprise."""
    with pytest.raises(DoesNotFitError) as error:
        planned("run_bnb", "24GB", ["TUNING_MODE=full"], ONE)
    shown = {remedy.variables: str(remedy) for remedy in error.value.remedies}
    for mode, recomputes in (("lora", True), ("qlora", False)):
        typed = [f"TUNING_MODE={mode}", "TRAIN_BATCH_SIZE=1"]
        assert planned("run_bnb", "24GB", typed, ONE).gradient_checkpointing is recomputes
        assert ("with recomputation" in shown[f"TUNING_MODE={mode}"]) is recomputes


def test_the_machines_that_hold_it_without_the_others_are_named() -> None:
    cards, typed = "RTX4090+RTX3060+RTX3070@1Gbit", [f"MODEL_NAME={plans.LLAMA}"]
    launch = LaunchRequest(command_strategy="auto", num_nodes=3)
    with pytest.raises(DoesNotFitError) as error:
        planned("home_lan", cards, typed, launch)
    seconds = figure(planned("home_lan", "RTX4090", [*typed, "LAUNCH_STRATEGY=auto"], ONE).seconds_per_step or 0)
    assert f"on node 0 (RTX4090) alone it fits: {seconds} s a step" in error.value.notes
    assert any(note.startswith("`launch.strategy: ddp` does not shard weights") for note in error.value.notes)
    # What only the small card needs would slow the large one down.
    offloaded = planned("home_lan", cards, [*typed, "TRAIN_ACTIVATION_OFFLOAD=on"], launch)
    words = f"FASTER on node 0 (RTX4090) alone with TRAIN_ACTIVATION_OFFLOAD=off: {seconds} s a step"
    assert any(notice.startswith(words) for notice in offloaded.notices), offloaded.notices


def test_the_smallest_number_of_cards_is_named_where_no_change_fits() -> None:
    typed = ["MODEL_NAME=meta-llama/Llama-3.1-70B-Instruct"]
    with pytest.raises(DoesNotFitError) as error:
        planned("run_bnb", "RTX4090", typed, ONE)
    assert error.value.notes == ("on 3 such cards in one machine it fits (make plan with HARDWARE=3x...)",)
    assert "quantisation 1.0" in error.value.message, "as the table calls it"
    assert outcome("run_bnb", "3xRTX4090", typed, AUTO)[0] and not outcome("run_bnb", "2xRTX4090", typed, AUTO)[0]
