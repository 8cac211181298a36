"""What is want of memory and what is not, and what is done about it: decided without processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, DataConfig, EvalConfig, LaunchConfig, ModelConfig, TrainConfig
from sft_play.launch import recovery
from sft_play.launch.liveness import SCALE
from sft_play.launch.run_folder import record_event
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome, judge
from sft_play.plan.architecture import shape_of
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.runs.folder import RunFolder
from sft_play.training.faults import ran_out_of_memory
from tests.documents import on_page
from tests.nvml_double import MACHINES, Machine
from tests.plans import planned
from tests.unit.test_launch_supervise import run_with, summary

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\nLast error:\nFailed to CUDA calloc 6291456 bytes"


class OutOfMemoryError(RuntimeError):
    """Named like torch's own, which needs no torch here."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), RuntimeError(NCCL),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug'),
    ],
)  # fmt: skip
def test_what_is_want_of_memory(error: Exception) -> None:
    assert ran_out_of_memory(error)
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert ran_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("CUDA out of memory"),
        RuntimeError("NCCL error: unhandled system error\nLast error:\nsocketStartConnect: Connect to 10.0.0.1 failed : Connection refused"),
    ],
)  # fmt: skip
def test_what_is_not(error: Exception) -> None:
    assert not ran_out_of_memory(error)


def test_the_real_errors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)


# ---- What the launcher makes of it


GONE = {"code": 75, "time": 2.5, "error": "RuntimeError: Connection closed by peer", "cause": "peer"}


def test_sigkill_is_want_of_memory_only_with_evidence(tmp_path: Path) -> None:
    run = run_with(tmp_path, {0: GONE})
    by_hand = judge(run, range(2), agent_code=1, agent_log=summary({1: -9}))
    assert (by_hand.code, by_hand.rank, by_hand.cause) == (75, 1, "killed")
    assert "nothing shows that memory was short" in by_hand.message
    kernel = judge(run, range(2), agent_code=1, agent_log=summary({1: -9}), memory_kill="`x` counts 1 kill for memory")
    assert (kernel.code, kernel.rank, kernel.cause) == (75, 1, OUT_OF_MEMORY)
    assert "because memory ran out (`x` counts 1 kill for memory)" in kernel.message


# ---- What is tried next


def config(**train: Any) -> Config:
    launch = LaunchConfig(max_oom_retries=train.pop("retries", 3))
    return Config(
        model=ModelConfig(name="Qwen/Qwen2.5-7B-Instruct", max_seq_len=512), data=DataConfig(), train=TrainConfig(**train), launch=launch,
        eval=EvalConfig(),
    )  # fmt: skip


def plan(settings: Config, request: LaunchRequest, hardware: str = "2x80GB") -> Plan:
    return planned(settings, hardware, request, typed=lambda _: True)


REQUEST = LaunchRequest(command_strategy="auto")
LOST_MEMORY = Outcome(
    code=75,
    rank=0,
    cause=OUT_OF_MEMORY,
    message="error: memory ran out in step 3 (RuntimeError: x)",
    doing={"phase": "training"},
)


def next_after(settings: Config, request: LaunchRequest, outcome: Outcome = LOST_MEMORY, retries: int = 0) -> LaunchRequest | str:
    return recovery.remedy(settings, shape_of(settings.model), plan(settings, request), request, outcome, retries)


@pytest.mark.parametrize("typed", [{}, {"batch_size": 8, "grad_accum": 2}])
def test_halving_down_to_one_row_then_recomputation_then_an_answer(typed: dict[str, int]) -> None:
    settings, request = config(retries=99, global_batch_size=32, **typed), REQUEST
    first, found = plan(settings, request), request
    for halvings in range(1, 10):
        answer = next_after(settings, request)
        assert isinstance(answer, LaunchRequest)
        found = answer
        if found.force_checkpointing:
            break
        before, after = plan(settings, request), plan(settings, found)
        assert after.global_batch_size == first.global_batch_size == 32
        for old, new in zip(before.ranks, after.ranks, strict=True):
            assert (new.micro_batch, new.accumulation) == (-(-old.micro_batch // 2), 2 * old.accumulation)
        assert after.learning_rate == first.learning_rate
        assert found.halvings == halvings
        request = found
    assert [rank.micro_batch for rank in plan(settings, request).ranks] == [1, 1]
    last = plan(settings, found)
    assert last.gradient_checkpointing
    assert not plan(settings, request).gradient_checkpointing
    assert [rank.micro_batch for rank in last.ranks] == [1, 1], "what recomputation saves is not spent on more rows"
    refusal = next_after(settings, found)
    assert isinstance(refusal, str)
    assert "the micro-batch is 1 already and gradient checkpointing is on already" in refusal
    assert "MODEL_MAX_SEQ_LEN=256" in refusal


@pytest.mark.parametrize(
    ("settings", "outcome", "retries", "words"),
    [
        (config(retries=0), LOST_MEMORY, 0, "`launch.max_oom_retries` is 0"),
        (config(retries=2), LOST_MEMORY, 2, "2 of 2 retries are used up (`launch.max_oom_retries`)"),
        (config(), replace(LOST_MEMORY, doing={"phase": "loading"}), 0, "the model alone does not fit"),
    ],
)
def test_when_it_does_not_go_on_by_itself(settings: Config, outcome: Outcome, retries: int, words: str) -> None:
    refusal = next_after(settings, REQUEST, outcome, retries)
    assert isinstance(refusal, str)
    assert words in refusal
    assert words in refusal
    assert "choose one: " in refusal


def test_events_remember_what_was_tried(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert recovery.remedies_so_far(run) == (0, False, False)
    record_event(run, "started", launch={"halvings": 0, "force_checkpointing": False})
    settings = config(batch_size=8, global_batch_size=32)
    before, after = plan(settings, REQUEST), plan(settings, replace(REQUEST, halvings=1))
    facts = recovery.facts(before, after, LOST_MEMORY, tmp_path / "step-000004")
    record_event(run, recovery.EVENT, launch={"halvings": 1, "force_checkpointing": True}, **facts)
    record_event(run, "failed", code=75)
    assert recovery.remedies_so_far(run) == (1, True, False)
    record_event(run, recovery.EVENT, launch={"halvings": 1, "force_checkpointing": True, "unpack": True}, **facts)
    assert recovery.remedies_so_far(run) == (1, True, True)
    assert recovery.recoveries(run) == (facts, facts)
    line = recovery.announcement(settings, before, after, LOST_MEMORY, tmp_path / "step-000004", 1)
    assert line == (
        "recovering: rank 0: memory ran out in step 3: micro-batch 8 x accumulation 2 -> 4 x 4 on every rank "
        "(although `train.batch_size` was given), global batch 32 as before; continuing from step-000004 (retry 1 of 3)"
    )
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
    """Changes the machine at once: the other process may be looking."""
    machine.write(folder / "next")
    (folder / "next" / "machine.json").replace(folder / "machine.json")


@pytest.mark.parametrize(("scale", "freed"), [("1", True), ("0", False)])
def test_a_restart_waits_for_the_memory_of_its_own_cards(scale: str, freed: bool, tmp_path: Path) -> None:
    pair = MACHINES["rtx3090_pair"]
    first, second = pair.cards
    variables = {**os.environ, **pair.environment(tmp_path), SCALE: scale}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        becomes(
            tmp_path, replace(pair, cards=(replace(first, free=1.0), replace(second, free=2.1)))
        )  # the first is not the run's
        process.stdin.write("\n")
        process.stdin.flush()
        said = [process.stderr.readline() for _ in range(2)][1]
        assert "21.5 GiB on cuda:1" in said and "cuda:0" not in said
        if freed:
            assert said.startswith("waiting until the memory of the processes that have ended is free")
            becomes(tmp_path, replace(pair, cards=(replace(first, free=1.0), second)))
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert ("still held after 0 s" in said + rest) is not freed
