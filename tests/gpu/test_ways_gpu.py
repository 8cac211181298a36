"""Ways to train on a real card: losses against a CPU's, types, memory within the plan, contexts, waits for the device.

Each way is one worker, started by `tests.fake_cuda.worker` without a guard; the CPU's own curve comes from the same
code.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.detect import detect
from tests.conftest import environment
from tests.emulated.machines import Start, ready, together
from tests.training_runs import column

pytestmark = pytest.mark.gpu

STEPS, EPOCH = 9, 3
"""Three passes over 24 rows."""
CONFIG = """
model: {{name: {model}, max_seq_len: 64}}
tuning: {{lora: {{dropout: 0.0}}}}
data: {{train_path: rows.jsonl}}
train: {{batch_size: 4, global_batch_size: 8, max_steps: {steps}, learning_rate: 5.0e-3, save_strategy: "no",
  eval_strategy: "no"}}
"""
PACKED = ("TRAIN_PACKING=on",)
EXACT, ROUNDED = 1e-3, 1e-2
"""The most that a step's loss may differ from the CPU's in fp32: computed in fp32, and in half precision (bf16 on a
CPU: 2e-4).
"""
LIKE_CPU: dict[str, tuple[tuple[str, ...], float]] = {
    "fp32": (("TRAIN_BF16=false",), EXACT),
    "default": ((), ROUNDED),
    "padded": (("MODEL_ATTN_IMPLEMENTATION=eager",), ROUNDED),
    "packed, sdpa": ((*PACKED, "MODEL_ATTN_IMPLEMENTATION=sdpa"), ROUNDED),
    "packed, varlen": ((*PACKED, "MODEL_ATTN_IMPLEMENTATION=varlen"), ROUNDED),
    "packed, flex": ((*PACKED, "MODEL_ATTN_IMPLEMENTATION=flex_attention"), ROUNDED),
    "packed, flash": ((*PACKED, "MODEL_ATTN_IMPLEMENTATION=flash_attention_2"), ROUNDED),
    "recomputed": (("TRAIN_GRADIENT_CHECKPOINTING=true",), ROUNDED),
    "fp16": (("TRAIN_FP16=true", "TRAIN_BF16=false"), ROUNDED),
    "chunked head": ((), ROUNDED),
}
LEARNS: dict[str, tuple[str, ...]] = {
    "nf4": ("TUNING_MODE=qlora",),
    "int8": ("TUNING_MODE=qlora", "TUNING_QUANTIZATION=int8"),
    "every weight": ("TUNING_MODE=full",),
}
NEEDS_AMPERE = ("packed, varlen", "packed, flash")


class Lab:
    """Trains each way once."""

    def __init__(self, folder: Path, cache: Path, model: Path) -> None:
        self.folder, self.cache = folder, cache
        self.config = folder / "train.yaml"
        self.config.write_text(CONFIG.format(model=model, steps=STEPS), encoding="utf-8")
        self.kept: dict[str, tuple[list[Start], list[dict[str, Any]]]] = {}

    def train(
        self, name: str, *words: str, command: str = "train", hidden: bool = False, **plan: Any
    ) -> tuple[list[Start], list[dict[str, Any]]]:
        """Return what was started and what each rank reports; `hidden` trains on the CPU, `plan` changes fields of the
        plan.
        """
        if name not in self.kept:
            env = environment(self.cache, self.folder / "runs", {"CUDA_VISIBLE_DEVICES": ""} if hidden else None)
            starts = ready(self.folder / "runs" / name, command, [f"CONFIG={self.config}", *words], env)
            replace(starts[0].plan, **plan).save(starts[0].run.plan)
            self.kept[name] = starts, together(starts)
        for report in self.kept[name][1]:
            assert "error" not in report, report["error"]
            assert (report["code"], report["steps"]) == (0, STEPS)
        return self.kept[name]

    def losses(self, name: str, *words: str, **options: Any) -> list[float]:
        """Return the loss of each step."""
        return column(self.train(name, *words, **options)[0][0].run, "loss")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("ways"), cache, tiny)


@pytest.mark.parametrize("name", LIKE_CPU)
def test_the_losses_are_those_of_a_cpu(name: str, lab: Lab) -> None:
    words, most = LIKE_CPU[name]
    if name == "packed, flash":
        pytest.importorskip("flash_attn", reason="the package flash_attn is not installed")
    if name in NEEDS_AMPERE and not detect().devices[0].bf16:
        pytest.skip("needs a card that computes in bfloat16")
    cpu = lab.losses("cpu", "TRAIN_BF16=false", hidden=True)
    assert lab.losses(name, *words, **({"loss_chunk": 64} if name == "chunked head" else {})) == pytest.approx(
        cpu, abs=most
    )


@pytest.mark.parametrize("name", LEARNS)
def test_every_way_to_train_lowers_the_loss(name: str, lab: Lab) -> None:
    losses = lab.losses(name, *LEARNS[name])
    assert statistics.fmean(losses[-EPOCH:]) < statistics.fmean(losses[:EPOCH])


@pytest.mark.parametrize("name", ["default", *LEARNS])
def test_memory_stays_within_the_plan_and_on_one_card(name: str, lab: Lab) -> None:
    starts, reports = lab.train(name, *LEARNS.get(name, ()))
    peak = json.loads(starts[0].run.training_metrics.read_text())["peak_memory_bytes"]
    assert peak <= starts[0].plan.ranks[0].peak_bytes
    # The plan's card is the only visible one, however many there are.
    assert (reports[0]["n_gpu"], reports[0]["contexts"]) == (1, [0])


def test_the_host_waits_for_the_device_between_micro_steps_only(lab: Lab) -> None:
    waits = lab.train("default")[1][0]["waits"]
    assert not [wait for wait in waits if wait["phase"] in ("forward", "backward") and wait["count"] >= STEPS]
    places = {wait["where"] for wait in waits if wait["phase"] in ("begin", "step") and wait["count"] >= STEPS}
    assert len(places) <= 13, sorted(places)


@pytest.mark.usefixtures("two_gpus")
def test_two_cards_give_the_losses_of_a_cpu_and_each_rank_has_its_own(lab: Lab) -> None:
    cpu = lab.losses("cpu", "TRAIN_BF16=false", hidden=True)
    words = ("NUM_GPUS=2", "TRAIN_BF16=false", "TRAIN_BATCH_SIZE=2")
    starts, reports = lab.train("two cards", *words, command="train-distributed")
    assert column(starts[0].run, "loss") == pytest.approx(cpu, abs=EXACT)
    assert [report["contexts"] for report in reports] == [[0], [1]]
