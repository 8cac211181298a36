"""What `train-cluster` does when memory ran out on one machine: known by its cause, changed on all, and told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.cluster import cause, recovering, train
from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import LoadedConfig, load_config, save_config
from sft_play.launch import recovery
from sft_play.launch.options import LaunchOptions
from sft_play.launch.resume import launch_facts, options_of_run
from sft_play.launch.run_folder import read_events, record_event
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.hardware import Device, Hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from sft_play.runs.folder import RunFolder
from tests.plans import prepared_model
from tests.unit.test_cluster_elastic import task_of
from tests.unit.test_cluster_parts import HOSTS, PEER, RANKS, ended

INVENTORY = Inventory(hosts=HOSTS[:2], network=None, ssh_config=None, path=Path("home.yaml"))
CPU = Device(name="a CPU", memory_bytes=64 * 2**30, free_bytes=64 * 2**30, bf16=False)
MACHINE = Hardware(kind="cpu", devices=(CPU,), cpu_threads=8, ram_bytes=64 * 2**30)
DOING = {"phase": "training", "step": 2, "micro_step": 1, "rows": [4, 7]}
SAID = "memory ran out in step 2, micro-batch 1 (rows 4, 7) (RuntimeError: x)"
SHORT = {"code": 75, "error": f"error: {SAID}", "cause": OUT_OF_MEMORY}
LOST_MEMORY = Outcome(
    code=75, rank=1, cause=OUT_OF_MEMORY, doing=DOING,
    message=f"error: host `node2`: {SAID}\n\nrank 1 (`node2`) ran out of memory; all hosts were stopped",
)  # fmt: skip


# ---- How it is known


def gone(rank: int, at: float) -> dict[str, Any]:
    return {"code": 75, "records": {rank: (PEER, at)}}


def test_a_rank_that_ran_out_says_what_it_was_doing(tmp_path: Path) -> None:
    own = {"code": 75, "records": {1: ({**SHORT, "doing": DOING}, 0.5)}}
    outcome = cause.judge(ended(tmp_path, gone(0, 0.4), own, gone(2, 0.6)), RANKS)
    assert outcome == LOST_MEMORY


def test_a_kill_by_the_kernel_is_want_of_memory_where_its_launcher_saw_it(tmp_path: Path) -> None:
    text = "error: rank 1 was killed by SIGKILL for want of memory (`x` counts 1 kill for memory); all other ranks were stopped"
    event = {"event": "failed", "code": 75, "rank": 1, "error": text, "cause": OUT_OF_MEMORY}
    outcome = cause.judge(ended(tmp_path, gone(0, 0.1), {"code": 75, "event": event}, gone(2, 0.1)), RANKS)
    assert (outcome.code, outcome.rank, outcome.cause, outcome.doing) == (75, 1, OUT_OF_MEMORY, {})
    by_hand = {**event, "error": "error: rank 1 was killed by SIGKILL", "cause": "killed"}
    outcome = cause.judge(ended(tmp_path, gone(0, 0.1), {"code": 75, "event": by_hand}, gone(2, 0.1)), RANKS)
    assert (outcome.code, outcome.cause) == (75, "killed")


def test_a_process_that_loads_data_counts_for_its_rank(tmp_path: Path) -> None:
    record = {"code": 1, "error": "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "}
    event = {"event": "failed", "code": 75, "rank": 1, "error": record["error"], "cause": OUT_OF_MEMORY}
    own = {"code": 75, "records": {1: (record, 0.5)}, "event": event}
    outcome = cause.judge(ended(tmp_path, gone(0, 0.6), own, gone(2, 0.6)), RANKS)
    assert (outcome.code, outcome.rank, outcome.cause) == (75, 1, OUT_OF_MEMORY)
    unseen = cause.judge(ended(tmp_path, gone(0, 0.6), {**own, "event": {}}, gone(2, 0.6)), RANKS)
    assert (unseen.code, unseen.cause) == (1, "failed")


def test_a_launcher_leaves_it_to_the_command_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recovery.CONTROLLED, raising=False)
    assert not recovery.is_left_to_cluster(LOST_MEMORY)
    monkeypatch.setenv(recovery.CONTROLLED, "token")
    assert recovery.is_left_to_cluster(LOST_MEMORY)
    assert not recovery.is_left_to_cluster(replace(LOST_MEMORY, cause="port"))


# ---- What changes


def settings_of(folder: Path, **train_keys: object) -> LoadedConfig:
    path = folder / "x.yaml"
    given = {"global_batch_size": 8, "max_steps": 4, "packing": "off", **train_keys}
    lines = "".join(f"  {key}: {value}\n" for key, value in given.items())
    path.write_text(
        f"model: {{name: HuggingFaceTB/SmolLM2-135M-Instruct, max_seq_len: 64}}\ndata: {{train_path: x.jsonl}}\ntrain:\n{lines}"
    )
    return load_config(path, environ={})


def begun(folder: Path, loaded: LoadedConfig, nodes: int = 2) -> tuple[RunFolder, Plan]:
    """A run that machines without GPUs were training."""
    run = RunFolder(folder / "runs" / "demo")
    request = LaunchRequest(command_strategy="auto", num_gpus=1, num_nodes=nodes, node_devices=(MACHINE.devices,) * nodes)
    plan = make_plan(loaded.config, loaded.typed, MACHINE, shape_of(loaded.config.model), launch=request, prepared=None)
    run.path.mkdir(parents=True)
    save_config(loaded, run.config)
    plan.save(run.plan)
    record_event(run, "started", launch=launch_facts(LaunchOptions(request=request)))
    return run, plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    return tmp_path


def go_on(run: RunFolder, outcome: Outcome = LOST_MEMORY, retries: int = 0) -> Outcome | None:
    return recovering.with_less(run, INVENTORY, prepared_model(run.path / "model"), outcome, retries)


def launched_next(run: RunFolder, node: int, *overrides: Override) -> LaunchRequest:
    """What the launcher of a machine takes from the run's events when it is started again."""
    options = {"RUN": "demo", "NUM_NODES": "2", "NUM_GPUS": "1", "NODE_RANK": str(node), "MASTER_ADDR": "192.168.77.11"}
    return options_of_run(Call(command="resume", options=options, overrides=overrides), run, Plan.load(run.plan)).request


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({}, ""),
        ({"batch_size": 4}, " (although `train.batch_size` was given)"),
        ({"batch_size": 4, "grad_accum": 1}, " (although `train.batch_size` and `train.grad_accum` were given)"),
    ],
)
def test_all_machines_go_on_with_half(
    typed: Mapping[str, int], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = settings_of(folder, **typed)
    run, before = begun(folder, loaded)
    assert [(rank.micro_batch, rank.accumulation) for rank in before.ranks] == [(4, 1), (4, 1)]
    assert go_on(run) is None
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("recovering: ")]
    assert "host `node2`: memory ran out in step 2, micro-batch 1 (rows 4, 7): " in line
    assert f"micro-batch 4 x accumulation 1 -> 2 x 2 on every rank{said}, global batch 8 as before" in line
    assert "going on from step 0: there is no checkpoint yet (retry 1 of 3)" in line
    (kept,) = recovery.recoveries(run)
    assert (kept["rank"], kept["cause"], kept["doing"], kept["checkpoint"]) == (1, OUT_OF_MEMORY, DOING, None)
    assert (kept["before"]["micro_batches"], kept["after"]["micro_batches"], kept["after"]["accumulation"]) == ([4, 4], [2, 2], 2)
    assert [launched_next(run, node).halvings for node in (0, 1)] == [1, 1], "the same on every machine"
    typed_now = Override(key="train.batch_size", text="4", origin="typed")
    assert [launched_next(run, node, typed_now).halvings for node in (0, 1)] == [0, 0]


def test_so_does_the_only_one_that_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `launch.elastic` the master may be alone: its launcher leaves memory to this command all the same."""
    run, _ = begun(folder, settings_of(folder, batch_size=4), nodes=1)
    assert go_on(run, replace(LOST_MEMORY, rank=0)) is None
    assert "micro-batch 4 x accumulation 2 -> 2 x 4 on every rank" in capsys.readouterr().err
    assert recovery.remedies_so_far(run) == (1, False, False)


def test_the_plans_next_remedy_comes_at_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = begun(folder, settings_of(folder, batch_size=1))
    assert go_on(run) is None
    assert "gradient checkpointing off -> on, global batch 8 as before" in capsys.readouterr().err
    assert [launched_next(run, node).force_checkpointing for node in (0, 1)] == [True, True]


def test_an_evaluation_is_halved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, before = begun(folder, settings_of(folder, batch_size=1))
    assert go_on(run, replace(LOST_MEMORY, doing={"phase": "evaluating"})) is None
    half = -(-before.eval_batch_size // 2)
    assert f"rows evaluated together {before.eval_batch_size} -> {half}" in capsys.readouterr().err


def test_shares_that_had_grown_go_back_to_the_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = begun(folder, settings_of(folder))
    assert go_on(run, replace(LOST_MEMORY, doing={**DOING, "micro_batch": 6})) is None
    assert "micro-batch 6 -> 4, and shares stay the plan's from here on" in capsys.readouterr().err
    assert launched_next(run, 0).halvings == 0
    assert recovery.recoveries(run), "with a recovery no micro-batch grows again (`training.balance`)"


@pytest.mark.parametrize(
    ("typed", "outcome", "retries", "why"),
    [
        ({}, LOST_MEMORY, 3, "3 of 3 retries are used up (`launch.max_oom_retries`)"),
        ({"batch_size": 1, "gradient_checkpointing": "false"}, LOST_MEMORY, 0, "gradient checkpointing is off as configured"),
        ({}, replace(LOST_MEMORY, doing={"phase": "loading"}), 0, "the model alone does not fit"),
    ],
)
def test_where_nothing_is_left_the_ways_out_are_named(
    typed: Mapping[str, object], outcome: Outcome, retries: int, why: str, folder: Path
) -> None:
    run, _ = begun(folder, settings_of(folder, **typed))
    found = go_on(run, outcome, retries)
    assert found is not None and (found.code, found.rank, found.cause) == (75, 1, OUT_OF_MEMORY)
    assert why in found.message and "hint: choose one: " in found.message
    assert "make train-fsdp" not in found.message and "make resume" not in found.message, "that is typed on one machine"
    assert [event["event"] for event in read_events(run)] == ["started"]


def test_ways_out_are_those_of_a_cluster() -> None:
    hint = "choose one: make train-fsdp: 2.0 GiB (1.0 less); make train-fsdp LAUNCH_STRATEGY=fsdp2: 2.0 GiB (1.0 less)"
    assert recovering._typed_here(hint) == (
        "choose one: LAUNCH_STRATEGY=fsdp2: 2.0 GiB (1.0 less); LAUNCH_STRATEGY=fsdp2: 2.0 GiB (1.0 less)"
    )


# ---- The command


def test_retries_are_counted_and_a_stop_is_no_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, asked, starts = task_of(tmp_path), [], []
    session = SimpleNamespace(asked="failure", stop=SimpleNamespace(wanted=False), nodes=[])
    host = Host(name="a", address="127.0.0.1")
    crew = train.Crew(hosts=[host], facts={})
    final = replace(LOST_MEMORY, message="error: no more")

    def less(*given: Any) -> Outcome | None:
        asked.append(given[-1])
        return final if given[-1] == 2 else None

    def started(*given: Any, **_: Any) -> tuple[Any, list[Host]]:
        starts.append(given[3])
        return session, []

    monkeypatch.setattr(train, "supplied", lambda *_, **__: crew)
    monkeypatch.setattr(train, "start", started)
    monkeypatch.setattr(train, "clear_up", lambda *_: None)
    monkeypatch.setattr(cause, "judge", lambda *_: LOST_MEMORY)
    monkeypatch.setattr(recovering, "with_less", less)
    muster = SimpleNamespace(for_restart=lambda _: ([host], {}))
    assert train.train(task, muster, crew, prepared_model(tmp_path)) is final  # type: ignore[arg-type]
    assert (asked, starts) == ([0, 1, 2], [0, 1, 2])
    session.stop.wanted = True
    assert train.train(task, muster, crew, prepared_model(tmp_path)) == LOST_MEMORY  # type: ignore[arg-type]
    assert asked == [0, 1, 2]
