"""Which errors are out of memory, and how a run recovers: decided without processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_play.config.schema import Config, LaunchConfig, ModelConfig, TrainConfig
from sft_play.launch import recovery
from sft_play.launch.liveness import SCALE
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.plan import LaunchRequest
from sft_play.plan.request import Request
from sft_play.training.faults import ran_out_of_memory
from tests.documents import on_page
from tests.nvml_double import MACHINES, Machine
from tests.plans import planned

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\nLast error:\nFailed to CUDA"
    " calloc 6291456 bytes"
)


@pytest.mark.parametrize(
    ("short", "error"),
    [
        (True, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
        (
            True,
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB"
            ),
        ),
        (
            True,
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate"
            ),
        ),
        (True, RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")),
        (True, RuntimeError(NCCL)),
        (
            True,
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please '
                "report a bug"
            ),
        ),
        (False, RuntimeError("CUDA error: an illegal memory access was encountered")),
        (False, RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
        (False, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (False, ValueError("CUDA out of memory")),
        (
            False,
            RuntimeError(
                "NCCL error: unhandled system error\nLast error:\n"
                "socketStartConnect: Connect to 10.0.0.1 failed : Connection refused"
            ),
        ),
    ],
)
def test_errors_that_mean_out_of_memory_are_recognised(short: bool, error: Exception) -> None:
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert [ran_out_of_memory(problem) for problem in (error, wrapped)] == [short, short]


# ---- What is tried next


def config(retries: int = 3, **train: Any) -> Config:
    model = ModelConfig(name="Qwen/Qwen2.5-7B-Instruct", max_seq_len=512)
    return Config(model=model, train=TrainConfig(**train), launch=LaunchConfig(max_oom_retries=retries))


REQUEST = LaunchRequest(command_strategy="auto")
LOST_MEMORY = Outcome(
    code=75,
    rank=0,
    cause=OUT_OF_MEMORY,
    message="error: memory ran out in step 3 (RuntimeError: x)",
    what="memory ran out in step 3",
    doing={"phase": "training"},
)


@pytest.mark.parametrize(
    ("settings", "outcome", "retries", "words"),
    [
        (config(retries=0), LOST_MEMORY, 0, "`launch.max_oom_retries` is 0"),
        (config(retries=2), LOST_MEMORY, 2, "2 of 2 retries are used up (`launch.max_oom_retries`)"),
        (config(), replace(LOST_MEMORY, doing={"phase": "loading"}), 0, "the model alone does not fit"),
    ],
)
def test_without_a_safe_remedy_the_choices_are_named(
    settings: Config, outcome: Outcome, retries: int, words: str
) -> None:
    plan = planned(settings, "2x80GB", REQUEST)
    request = Request(
        config=settings, hardware=parse_hardware("2x80GB"), shape=shape_of(settings.model), launch=REQUEST
    )
    refusal = recovery.remedy(request, plan, outcome, retries)
    assert isinstance(refusal, str) and words in refusal
    assert "choose one: " in refusal


def test_the_announcement_matches_the_guide(tmp_path: Path) -> None:
    settings = config(batch_size=8, global_batch_size=32)
    before, after = (planned(settings, "2x80GB", replace(REQUEST, halvings=count)) for count in (0, 1))
    line = recovery.announcement(settings, before, after, LOST_MEMORY, tmp_path / "step-000004", 1)
    assert on_page("cuda-out-of-memory", line)


PROGRAM = """
import sys
from sft_play.launch import attempt
from sft_play.plan.detect import detect
before = detect()
print("ready", flush=True)
sys.stdin.readline()
attempt.wait_until_free(before, [1])
"""


def becomes(folder: Path, machine: Machine) -> None:
    """Change the machine atomically, since the other process may be reading it."""
    machine.write(folder / "next")
    (folder / "next" / "machine.json").replace(folder / "machine.json")


@pytest.mark.parametrize(("scale", "freed"), [("1", True), ("0", False)])
def test_a_restart_waits_for_the_memory_of_its_own_cards(scale: str, freed: bool, tmp_path: Path) -> None:
    pair = MACHINES["rtx3090_pair"]
    first, second = pair.cards
    variables = {**os.environ, **pair.environment(tmp_path), SCALE: scale}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=variables,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        becomes(
            tmp_path, replace(pair, cards=(replace(first, free=1.0), replace(second, free=2.1)))
        )  # the first is not the run's
        process.stdin.write("\n")
        process.stdin.flush()
        notice = [process.stderr.readline() for _ in range(2)][1]
        assert "21.5 GiB on cuda:1" in notice and "cuda:0" not in notice
        if freed:
            assert notice.startswith("waiting for the memory of ended processes to be freed")
            becomes(tmp_path, replace(pair, cards=(replace(first, free=1.0), second)))
        _, rest = process.communicate(timeout=240)
    assert process.returncode == 0
    assert ("still held after 0 s" in notice + rest) is not freed
