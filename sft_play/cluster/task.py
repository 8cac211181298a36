"""What `train-cluster` was asked for, which machines are fit for it, and the commands that it types on them: those that
a person would.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from sft_play.cluster import bring
from sft_play.cluster.findings import Wanted, faults
from sft_play.cluster.hosts import (
    ask,
    gather,
    is_here,
    on_all,
    print_line,
    require_master_here,
    settings_to_forward,
    shared_variables,
)
from sft_play.cluster.inventory import Host, Inventory, inventory_for_call
from sft_play.cluster.remote import Facts
from sft_play.config.call import Call
from sft_play.config.keys import variable_name
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, override_config, own_words, save_config, saved_form
from sft_play.errors import HardwareError, Problems, UserError, raise_all
from sft_play.files import lock, text_sha256, typed_path
from sft_play.launch.attempt import DELIVERED, day_words, run_preparation
from sft_play.launch.deepspeed import read_user_json
from sft_play.launch.environment import next_free_port, require_free_port
from sft_play.launch.machines import FETCH
from sft_play.launch.resume import check_overrides
from sft_play.launch.run_folder import choose_name, find_run, has_started, names_from
from sft_play.launch.settings import NO_DEFAULT_FILE
from sft_play.plan.plan import Plan
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.runs.prepared import Prepared, day_of
from sft_play.text import plural

PORT = 29500
NOT_WITH_RUN = {
    "RUN_NAME": "it starts a new run",
    "DEEPSPEED_CONFIG": "a run keeps its DeepSpeed settings; RUN_NAME starts a new one with others",
    "CLUSTER_NETWORK": "a run keeps the network's speed; LAUNCH_NETWORK changes it",
}
"""Options that cannot stand next to `RUN`, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One `train-cluster`."""

    call: Call
    inventory: Inventory
    loaded: LoadedConfig
    run: RunFolder
    resuming: bool
    """`RUN=` was given: the run exists and is resumed."""
    deepspeed: str | None = None
    """Text of the user's `DEEPSPEED_CONFIG`, read and checked before anything is sent."""

    @property
    def variables(self) -> dict[str, str]:
        """Where all machines keep runs and cache, when these are on a disk that all of them see."""
        return shared_variables(self.loaded.config.data.sync == "shared")


def read_task(call: Call) -> Task:
    """Return what was asked for. Raise `UserError` for what cannot be started."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    options, name = call.options, call.options.get("RUN")
    if name:
        run = find_run(name)
        raise_all(
            [
                UserError(
                    f"`RUN` resumes a run, and `{option}` cannot be given with it: {why}",
                    place=f"{option}={options[option]}",
                )
                for option, why in NOT_WITH_RUN.items()
                if options.get(option)
            ]
        )
        if run.path.resolve() != (runs_folder() / run.name).resolve():
            raise UserError(
                f"`{run.path}` is not in `{runs_folder()}`, where the machines look for runs",
                hint="RUNS_DIR says where",
            )
        check_overrides(call)
        loaded = call.load_config()
    else:
        loaded = call.load_config()
        run = RunFolder(runs_folder() / choose_name(options.get("RUN_NAME"), loaded.path))
        begun = loaded.config.launch.auto_resume and (not run.config.is_file() or has_started(run))
        if "RUN_NAME" in options and run.path.exists() and not begun:
            raise UserError(
                f"the run `{run.name}` exists already: `{run.path}`",
                hint=f"choose another RUN_NAME, or resume it: {command(inventory, run)}",
            )
        if inventory.network and loaded.config.launch.network is None:
            speed = Override(key="launch.network", text=inventory.network, origin=str(inventory.path))
            loaded = override_config(loaded, [speed])
    own = read_user_json(typed_path(options["DEEPSPEED_CONFIG"])) if options.get("DEEPSPEED_CONFIG") else None
    deepspeed = json.dumps(dict(own.settings), indent=2) if own else None
    return Task(call=call, inventory=inventory, loaded=loaded, run=run, resuming=bool(name), deepspeed=deepspeed)


def command(inventory: Inventory, run: RunFolder) -> str:
    """Return what a user types to resume a run."""
    return f"make train-cluster CLUSTER={inventory.path} RUN={run.name}"


def plan_of(run: RunFolder) -> Plan | None:
    """Return a run's plan; `None` where there is none yet."""
    with contextlib.suppress(UserError, OSError):
        return Plan.load(run.plan)
    return None


def is_begun(run: RunFolder) -> bool:
    """Whether workers were ever started for a run, so that it is resumed."""
    return has_started(run) and plan_of(run) is not None


def take_over(task: Task) -> Task:
    """Return the task; of a run that was killed before its workers started, one that begins in the folder that was
    left.
    """
    if not (task.resuming and task.run.path.is_dir()) or is_begun(task.run) or task.loaded.config.launch.auto_resume:
        return task
    print_line(f"`{task.run.name}` had not begun; it begins now")
    given = Override(key="launch.auto_resume", text="true", origin=f"RUN={task.run.name}")
    return replace(task, loaded=override_config(task.loaded, [given]))


# ---- Which machines


def choose_machines(task: Task) -> dict[str, Facts]:
    """Ask all machines; return host name -> its facts. Raise every reason why a host cannot take part."""
    return _all_ready(judge_machines(task, task.inventory.hosts))


def _all_ready(answers: Mapping[str, Facts | UserError]) -> dict[str, Facts]:
    """Return the facts of all hosts. Raise every reason why one is not ready."""
    raise_all(
        [
            one
            for error in answers.values()
            if isinstance(error, UserError)
            for one in (error.problems if isinstance(error, Problems) else [error])
        ]
    )
    return {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}


def judge_machines(task: Task, hosts: Sequence[Host]) -> dict[str, Facts | UserError]:
    """Return host name -> its facts, or why it cannot take part. Asks the master too, with which the others are
    compared.
    """
    master = task.inventory.master
    asked = hosts if master in hosts else [master, *hosts]
    answers = gather(asked, task.variables, task.run.name)
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    problems = faults(facts, replace(task.inventory, hosts=tuple(asked)), Wanted(shared=bool(task.variables)))
    for host in asked:
        if host.name in facts and (found := [*problems[host.name], *unfit(task, host, facts[host.name])]):
            answers[host.name] = found[0] if len(found) == 1 else Problems(found)
    return {host.name: answers[host.name] for host in hosts}


def unfit(task: Task, host: Host, facts: Facts) -> Iterator[UserError]:
    """Yield why a machine with a separate run folder cannot take part in this run."""
    if is_here(host) or facts.shares_runs:
        return
    config = task.loaded.config
    sharded = config.launch.strategy.startswith("zero") or config.launch.strategy == "fsdp2" or task.deepspeed
    if sharded and config.train.save_strategy != "no":
        yield UserError(
            f"under ZeRO and FSDP2 every machine writes a part of each checkpoint, and `{host.name}` has its own run"
            " folder",
            place=task.loaded.origins.get("launch.strategy"),
            hint=(
                "DATA_SYNC=shared with RUNS_DIR and SFT_PLAY_CACHE on a disk that all hosts see; or"
                " LAUNCH_STRATEGY=ddp, where a complete copy fits each device; or TRAIN_SAVE_STRATEGY=no: no"
                " checkpoints"
            ),
        )
    if facts.run_there and not task.run.path.exists():  # else it is this run's own start, repeated or resumed
        yield UserError(
            f"host `{host.name}` still has a run `{task.run.name}`, of another start: `{facts.run_there}`",
            place=host.place,
            hint="choose another RUN_NAME; or remove that folder there",
        )


def choose_port(task: Task) -> int:
    """Return the port of the launchers' store: the typed one, else a free one from 29500 on. Raise `HardwareError`."""
    if typed := task.call.port("MASTER_PORT"):
        require_free_port(typed, hint="end it, or choose another MASTER_PORT; `ss -ltnp` lists who listens")
        return typed
    port = next_free_port(PORT, "0.0.0.0", "MASTER_PORT")
    if port != PORT:
        print_line(f"port {PORT} is taken; taking {port}")
    return port


# ---- What they lack


def prepare(task: Task) -> Prepared:
    """Find the model and prepare the data on this machine, once for all."""
    folder = cache_folder() / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"prepare-{task.run.name}-", dir=folder) as name:
        run = RunFolder(Path(name))
        save_config(task.loaded, run.config)
        day = day_words(day_of(task.run.prepared))
        run_preparation([sys.executable, "-m", "sft_play.prepare", "--run", str(run.path), *day])
        return Prepared.load(run.prepared)


def supply_all(task: Task, facts: Mapping[str, Facts], prepared: Prepared) -> list[tuple[Host, Facts]]:
    """Bring every machine what it lacks: code, model, prepared rows, and of a run that is resumed its newest
    checkpoint.

    Raise why a machine could not get it.
    """
    hosts = [host for host in task.inventory.hosts if host.name in facts]
    print_line(f"hosts: {', '.join(f'`{host.name}` ({host.address})' for host in hosts)}")
    away = [host for host in hosts if not is_here(host)]
    files = bring.code_files(report=True) if away else []
    if away:
        what = f"{plural(len(files), 'file')} of the project{'' if task.variables else ', model and data'}"
        print_line(f"bringing to {plural(len(away), 'host')} what they lack: {what}")
    done = on_all(hosts, lambda host: supply(task, host, facts[host.name], prepared, files))
    ready = _all_ready(done)
    return [(host, ready[host.name]) for host in hosts]


def supply(task: Task, host: Host, facts: Facts, prepared: Prepared, files: Sequence[str]) -> Facts:
    """Bring one machine what it lacks, and its launcher's configuration; return its facts. Raise `UserError`."""
    there = prepared
    if not is_here(host):
        bring.send_code(host, files)
        # What an earlier start left there, of a host whose link was cut and is back, would hold the run.
        ask(host, "end", run=task.run.name, variables=task.variables)
        if not task.variables:
            there = bring.send_prepared(host, facts, task.loaded.config, prepared)
        if is_begun(task.run):
            bring.send_run(host, facts, task.run, newest_valid(task.run)[0])
    given = {
        "config": json.dumps(saved_form(task.loaded)),
        "prepared": json.dumps(asdict(there)),
        "deepspeed": task.deepspeed,
    }
    folder = files_folder(facts, task.run, host)
    ask(host, "write", files={f"{folder}/{name}.json": text for name, text in given.items() if text})
    return facts


# ---- What is typed there


def files_folder(facts: Facts, run: RunFolder, host: Host) -> str:
    """Return where a machine keeps what its launcher of a run reads; by host, since machines may share a cache."""
    return f"{facts.cache}/cluster/{run.name}/{host.name}"


def node_words(task: Task, host: Host, facts: Facts, rank: int, count: int, port: int, *, resume: bool) -> list[str]:
    """Return the words for Python of the launcher on one machine, `NODE_RANK` `rank` of `count`: what a person would
    type there.
    """
    folder = files_folder(facts, task.run, host)
    if resume:
        words = ["-m", "sft_play", "resume", f"RUN={task.run.name}"]
        words += (
            [f"{variable_name(one.key)}={one.text}" for one in task.call.overrides]
            if task.resuming
            else own_words(task.loaded)
        )
    else:
        words = [
            "-m",
            "sft_play",
            "train-deepspeed" if task.deepspeed else "train-distributed",
            f"CONFIG={folder}/config.json",
        ]
        words += [f"RUN_NAME={task.run.name}", NO_DEFAULT_FILE, *own_words(task.loaded)]
        words += [f"DEEPSPEED_CONFIG={folder}/deepspeed.json"] if task.deepspeed else []
    gpus = host.gpus if host.gpus is not None else facts.gpu_count
    words += [f"NUM_GPUS={max(1, gpus)}", f"NUM_NODES={count}", f"MASTER_PORT={port}"]
    return words + ([f"NODE_RANK={rank}", f"MASTER_ADDR={task.inventory.master.address}"] if count > 1 else [])


def node_variables(task: Task, host: Host, facts: Facts) -> dict[str, str]:
    """Return what a machine's launcher gets on top of its own environment."""
    given = task.variables | {DELIVERED: f"{files_folder(facts, task.run, host)}/prepared.json"}
    if not is_here(host):
        given |= settings_to_forward(os.environ) | {
            "HF_HUB_OFFLINE": "1"
        }  # all was brought; asking the hub would make machines differ
        given |= {} if facts.shares_runs else {FETCH: "1"}
    if host.interface:
        # To NCCL a name without `=` is a prefix: `eth1` would be `eth10` too.
        given |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": f"={host.interface}"}
    return given | ({"CUDA_VISIBLE_DEVICES": ""} if host.gpus == 0 else {})


# ---- Of two commands for one run, the second is refused; `cluster-stop` finds the first


def _lock_file(run: RunFolder) -> Path:
    """Return the file that the command which controls a run holds; not in its folder, which its own launcher makes."""
    return cache_folder() / "cluster" / f"{text_sha256(str(run.path.absolute()))[:16]}.lock"


@contextlib.contextmanager
def control_run(task: Task) -> Iterator[Task]:
    """Keep a run for this command; return the task, where nobody named the run with the next free name.

    Raise `UserError` when another command controls it.
    """
    unnamed = not task.resuming and "RUN_NAME" not in task.call.options
    for run in names_from(task.run.name) if unnamed else [task.run]:
        path = _lock_file(run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock(path)
        except OSError as error:
            hint = "SFT_PLAY_CACHE moves it to another disk; a network disk may have no file locks"
            raise HardwareError(f"cannot be locked: {error.strerror}", place=str(path), hint=hint) from error
        if descriptor is None and not unnamed:
            raise UserError(
                f"the run `{run.name}` is in use: process {_owner(path).get('pid', '?')} trains it on a cluster",
                hint=f"wait for it, or: make cluster-stop CLUSTER={task.inventory.path} RUN={run.name}",
            )
        if descriptor is None:
            continue
        try:
            if unnamed and run.path.exists():
                continue
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "run": str(run.path.absolute())}).encode())
            yield replace(task, run=run)
            return
        finally:
            os.close(descriptor)


def _owner(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def controller(run: RunFolder) -> psutil.Process | None:
    """Return the process of this machine that controls a run over its cluster now; `None` where there is none."""
    path = _lock_file(run)
    with contextlib.suppress(OSError, ValueError, LookupError, psutil.Error):
        if (descriptor := lock(path, shared=True)) is None:
            return psutil.Process(int(_owner(path)["pid"]))
        os.close(descriptor)
    return None


def controlled_runs() -> list[RunFolder]:
    """Return the runs that commands of this machine control; a command that was killed leaves its lock's file."""
    owners = [_owner(path) for path in sorted((cache_folder() / "cluster").glob("*.lock"))]
    runs = [RunFolder(Path(one["run"])) for one in owners if "run" in one]
    return [run for run in runs if controller(run)]
