"""`make train-cluster`: start, show and stop one run on all machines of an inventory; and `runs`, `logs` and `stop` on
each of them.

Every machine runs, under SSH, the command that a person would type there: the launchers meet, watch each other and
decide as if started manually. This command copies what the machines lack, shows their output, and ends with the exit
code of node 0's launcher, which runs here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from sft_play.cluster import bring
from sft_play.cluster.check import Facts, compare, shared_folders
from sft_play.cluster.inventory import Host, Inventory, inventory_for_call
from sft_play.cluster.ssh import (
    NO_FOLDER,
    NO_PROGRAM,
    NOT_A_PROGRAM,
    SSH_FAILED,
    TIMED_OUT,
    arguments,
    ask,
    failed,
    is_here,
    on_all,
    program,
    relay,
    require_master_here,
    run,
    settings_to_forward,
    start,
    trouble,
)
from sft_play.config.call import Call
from sft_play.config.keys import variable_name
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, override_config, own_words, save_config, saved_form
from sft_play.errors import HardwareError, UserError, printable, raise_all
from sft_play.files import typed_path
from sft_play.launch.attempt import DELIVERED, obtain_prepared
from sft_play.launch.deepspeed import read_user_json
from sft_play.launch.environment import PORT, VARIABLE, next_free_port, require_free_port
from sft_play.launch.machines import FETCH
from sft_play.launch.node import Stop
from sft_play.launch.process import bind_to_parent, hear_signals, stop_code
from sft_play.launch.resume import check_overrides
from sft_play.launch.run_folder import (
    RECOVERED,
    RESTARTED,
    STARTS,
    choose_name,
    find_named_run,
    has_started,
    last_plan,
    lock_run,
    read_events,
)
from sft_play.launch.settings import NO_DEFAULT_FILE
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.runs.gate import read_facts
from sft_play.runs.prepared import Prepared, day_of
from sft_play.text import plural, tell

TICK_SECONDS, POLL_SECONDS = 0.2, 5.0
GRACE_SECONDS = 10.0
"""Time limit for node 0 to report why a machine could not start."""
LEAVE_SECONDS, LOGS_SECONDS = 3.0, 8.0
"""Time limits for the others to end after node 0, which waits for all that answer, and to send their logs."""
CANNOT_START = (SSH_FAILED, NO_FOLDER, NO_PROGRAM, NOT_A_PROGRAM)
CTRL_C = b"\x03"
LAUNCH = 'set -a; . "$1" && rm -f "$1"; set +a; shift; exec "$@"'
"""Arguments: a file with the launcher's variables, among them the run's key, and the command to run with them."""
RELEASE = 'i=0; until rm "$1" 2>/dev/null; do i=$((i+1)); [ $i -lt 60 ] || exit 1; sleep 0.2; done'
"""Argument: the file by which a launcher asks for a checkpoint (`launch.attempt.newest_here`), which is removed.
"""
NOT_WITH_RUN = ("RUN_NAME", "DEEPSPEED_CONFIG")
"""Options that only start a run."""


def main(call: Call) -> int:
    """Train on the machines of `CLUSTER` and return the exit code of node 0's launcher."""
    task = read_task(call)
    task.port = choose_port(call)  # a taken port is reported before anything is prepared
    hosts, away = task.inventory.hosts, [host for host in task.inventory.hosts if not is_here(host)]
    tell(f"hosts: {', '.join(f'`{host.name}` ({host.address})' for host in hosts)}")
    if away:
        files = bring.code_files()
        tell(f"bringing to {plural(len(away), 'host')} what they lack: {plural(len(files), 'file')} of code")
        require_all(on_all(away, lambda host: bring.send_code(host, files)))
    task.facts = ready(task)
    prepared = prepare(task)
    require_all(on_all(hosts, lambda host: supply(task, host, prepared)))
    return task.train()


def read_task(call: Call) -> Task:
    """Return the command's request. Raise `UserError` if it cannot be started."""
    inventory, options = inventory_for_call(call), call.options
    require_master_here(inventory)
    if "RUN" in options:
        folder = find_named_run(call)
        hint = "a run keeps what it was started with; keys such as LAUNCH_NETWORK change it"
        raise_all(
            [
                UserError(f"`{name}` cannot be given with `RUN`", place=f"{name}={options[name]}", hint=hint)
                for name in NOT_WITH_RUN
                if name in options
            ]
        )
        if folder.path.resolve() != (runs_folder() / folder.name).resolve():
            text = f"`{folder.path}` is not in `{runs_folder()}`, where the machines look for runs"
            raise UserError(text, hint="RUNS_DIR says where")
        with lock_run(folder):  # refuses a run that is being trained
            last_plan(folder)
        check_overrides(call)
        return Task(call=call, inventory=inventory, loaded=call.load_config(), run=folder, started=True)
    loaded = call.load_config()
    folder = RunFolder(runs_folder() / choose_name(options.get("RUN_NAME"), loaded.path))
    if folder.path.exists() and not loaded.config.launch.auto_resume:
        hint = f"choose another RUN_NAME, or resume it: {command(inventory, folder)}"
        raise UserError(f"the run `{folder.name}` exists already: `{folder.path}`", hint=hint)
    if inventory.network and loaded.config.launch.network is None:
        speed = Override(key="launch.network", text=inventory.network, origin=str(inventory.path))
        loaded = override_config(loaded, [speed])
    deepspeed = None
    if own := options.get("DEEPSPEED_CONFIG"):
        read_user_json(typed_path(own))
        deepspeed = typed_path(own).read_text(encoding="utf-8")
    started = has_started(folder)
    return Task(call=call, inventory=inventory, loaded=loaded, run=folder, started=started, deepspeed=deepspeed)


def command(inventory: Inventory, folder: RunFolder) -> str:
    """Return the command that resumes a run."""
    return f"make train-cluster CLUSTER={inventory.path} RUN={folder.name}"


def choose_port(call: Call) -> int:
    """Return the port at which the machines meet: the typed port, else the first free one from 29500. Raise
    `HardwareError`.
    """
    port = call.port("MASTER_PORT") or next_free_port(PORT, "0.0.0.0", "MASTER_PORT")
    require_free_port(port, hint="end it, or choose another MASTER_PORT")
    return port


# ---- Before the start


def require_all(results: Mapping[str, object]) -> None:
    """Raise every reason why a host is not ready."""
    raise_all([result for result in results.values() if isinstance(result, UserError)])


def ready(task: Task) -> dict[str, Facts]:
    """Return host name -> its facts. Raise every reason why a host cannot take part."""
    config = task.loaded.config
    answers = compare(task.inventory, shared=task.shared, backend=config.launch.backend)
    raise_all(
        [
            HardwareError(f"host `{answer.host.name}`: {finding.text}", place=answer.host.place, hint=finding.remedy)
            for answer in answers
            for finding in answer.findings
            if finding.severity == "fail"
        ]
    )
    return {answer.host.name: answer.facts for answer in answers if answer.facts}


def prepare(task: Task) -> Prepared:
    """Resolve the model and prepare the data on this machine, for all machines."""
    parent = cache_folder() / "cluster"
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"prepare-{task.run.name}-", dir=parent) as name:
        folder = RunFolder(Path(name))
        save_config(task.loaded, folder.config)
        obtain_prepared(folder, day=day_of(task.run.prepared))
        return Prepared.load(folder.prepared)


def supply(task: Task, host: Host, prepared: Prepared) -> None:
    """Copy model, rows, the run to resume and the launcher's configuration to one machine. Raise `UserError`."""
    facts = task.facts[host.name]
    if not is_here(host) and not task.shared:
        named = (task.loaded.config.model.name, task.loaded.config.model.tokenizer)
        folders = [typed_path(name).absolute() for name in named if name]
        prepared = bring.send_prepared(host, facts, prepared, folders)
        if task.started:
            bring.send_run(host, facts, task.run, newest_valid(task.run)[0])
    texts = {"config.json": json.dumps(saved_form(task.loaded)), "prepared.json": json.dumps(asdict(prepared))}
    texts |= {"deepspeed.json": task.deepspeed} if task.deepspeed else {}
    for name, text in texts.items():
        bring.write_there(host, f"{task.folder(host)}/{name}", text)


# ---- The command on each machine


def node_words(task: Task, host: Host, rank: int) -> list[str]:
    """Return the command of the machine with `NODE_RANK` `rank`, as a person would type it there."""
    folder, count = task.folder(host), len(task.inventory.hosts)
    if "RUN" in task.call.options:
        words = ["resume", f"RUN={task.run.name}"]
        words += [f"{variable_name(override.key)}={override.text}" for override in task.call.overrides]
        words += ["MODEL_TRUST_REMOTE_CODE=true"] if task.call.trusts_code else []
    else:
        words = ["train-deepspeed" if task.deepspeed else "train-distributed", f"CONFIG={folder}/config.json"]
        words += [f"RUN_NAME={task.run.name}", NO_DEFAULT_FILE, *own_words(task.loaded)]
        words += [f"DEEPSPEED_CONFIG={folder}/deepspeed.json"] if task.deepspeed else []
    gpus = host.gpus if host.gpus is not None else len(task.facts[host.name].gpus)
    words += [f"NUM_GPUS={max(1, gpus)}", f"NUM_NODES={count}", f"MASTER_PORT={task.port}"]
    return words + ([f"NODE_RANK={rank}", f"MASTER_ADDR={task.inventory.master.address}"] if count > 1 else [])


def node_variables(task: Task, host: Host) -> dict[str, str]:
    """Return the variables added to the environment of a machine's launcher."""
    variables = {**task.shared, DELIVERED: f"{task.folder(host)}/prepared.json"}
    if not is_here(host):  # everything was copied, and asking the hub could make machines differ
        variables |= {**settings_to_forward(os.environ), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
        variables |= {} if task.shared else {FETCH: "1"}
    if host.interface:
        # NCCL takes a name without `=` as a prefix: `eth1` would match `eth10`.
        variables |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": f"={host.interface}"}
    return variables | ({"CUDA_VISIBLE_DEVICES": ""} if host.gpus == 0 else {})


# ---- During training


@dataclass(slots=True)
class Launcher:
    """The command on one machine."""

    host: Host
    process: subprocess.Popen[bytes]
    error: str = ""
    """Its first error line, else its last line."""
    ended_at: float | None = None
    reader: threading.Thread | None = None
    """Thread that prints the output of another machine."""

    def code(self) -> int | None:
        """Return its exit code, or `None` while it runs."""
        if self.process.poll() is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return self.process.returncode

    def read(self) -> None:
        """Print its output until it ends."""
        self.error = relay(self.host, self.process)


@dataclass(kw_only=True, slots=True)
class Task:
    """One `train-cluster` command: the request, what is known about the machines, and their launchers."""

    call: Call
    inventory: Inventory
    loaded: LoadedConfig
    run: RunFolder
    started: bool
    """Whether the run has started before."""
    deepspeed: str | None = None
    """Text of the user's `DEEPSPEED_CONFIG`, checked before anything is sent."""
    port: int = PORT
    """Port at which the machines meet."""
    facts: dict[str, Facts] = field(default_factory=dict)
    """Facts of each host, by its name."""
    launchers: list[Launcher] = field(default_factory=list)
    """The commands on the machines, by their `NODE_RANK`."""
    stop: Stop = field(default_factory=Stop)
    passed: int = 0
    """Number of stop requests passed on to the launchers."""
    before: int = 0
    """Number of the run's events before this command."""
    restarts: int = 0
    """Restarts of node 0 for which checkpoints were copied."""

    @property
    def shared(self) -> dict[str, str]:
        """Variables of the folders of runs and cache, if they are on a shared disk."""
        return shared_folders(self.loaded.config.data.sync)

    def folder(self, host: Host) -> str:
        """Return the folder with the files of a machine's launcher, named by host since machines may share a cache."""
        return f"{self.facts[host.name].cache}/cluster/{self.run.name}/{host.name}"

    def train(self) -> int:
        """Start the launchers, wait for node 0's, and return its exit code."""
        hosts, problem = self.inventory.hosts, ""
        self.before = len(self.events())
        key = {VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex(32)} if len(hosts) > 1 else {}
        variables = {host: node_variables(self, host) | key for host in hosts}
        require_all(on_all(hosts[1:], lambda host: self.send_variables(host, variables[host])))
        with hear_signals(self.stop.note):
            self.launchers = [self.start(rank, host, variables[host]) for rank, host in enumerate(hosts)]
            while self.launchers[0].code() is None:
                time.sleep(TICK_SECONDS)
                self.pass_signals()
                self.bring_checkpoints()
                problem = problem or self.end_where_one_cannot_begin()
            until = time.monotonic() + LEAVE_SECONDS
            while any(launcher.code() is None for launcher in self.launchers) and time.monotonic() < until:
                time.sleep(TICK_SECONDS)
        for launcher in self.launchers:
            launcher.process.terminate()  # closing the connection ends the remaining processes there
            if launcher.reader:
                launcher.reader.join(LEAVE_SECONDS)
        if not self.shared and self.run.path.is_dir():
            on_all(hosts[1:], self.fetch_logs)
        return self.say_how_it_ended(problem)

    def send_variables(self, host: Host, variables: Mapping[str, str]) -> None:
        """Send a launcher its variables in a file, since command lines are visible to every user of a machine and one
        variable is the run's key.
        """
        text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
        bring.write_there(host, f"{self.folder(host)}/environment", text)

    def fetch_logs(self, host: Host) -> None:
        """Copy the logs of a machine's ranks to the run's folder here."""
        bring.fetch(host, f"{self.facts[host.name].runs}/{self.run.name}/logs/", self.run.logs, LOGS_SECONDS)

    def start(self, rank: int, host: Host, variables: Mapping[str, str]) -> Launcher:
        """Start the command on one machine, bound to this process; lines of other machines get the host's name."""
        words, environ = node_words(self, host, rank), dict(os.environ)
        if rank:
            file = f"{self.folder(host)}/environment"
            argv = arguments(host, ["sh", "-c", LAUNCH, "sh", file, *program(host, words)], tty=True)
        else:
            argv = program(host, [*words, *(["JSON=1"] if self.call.json else [])])
            environ |= {**variables, "TERM": "dumb"}  # a panel would be disturbed by the lines of the others
        process = start(
            argv,
            env=environ,
            stdin=subprocess.PIPE if rank else subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank or self.call.json else None,
            stderr=subprocess.STDOUT if rank else None,
            start_new_session=True,
            preexec_fn=bind_to_parent(signal.SIGTERM),
        )
        launcher = Launcher(host, process)
        if rank:
            launcher.reader = threading.Thread(target=launcher.read, daemon=True)
            launcher.reader.start()
        return launcher

    def events(self) -> list[str]:
        """Return the events that node 0 has recorded."""
        return [event["event"] for event in read_events(self.run, 0)]

    def pass_signals(self) -> None:
        """Pass a stop request on to the launchers; a second Ctrl-C kills them."""
        if self.passed == len(self.stop.signals):
            return
        text = (
            "stopping all hosts: the workers finish their step, save a checkpoint and exit; Ctrl-C once more kills them"
        )
        tell(f"\n{'killing the workers on all hosts' if self.passed else text}")
        self.passed = len(self.stop.signals)
        self.launchers[0].process.send_signal(self.stop.signals[-1])
        for launcher in self.launchers[1:]:
            with contextlib.suppress(OSError):
                assert launcher.process.stdin is not None
                launcher.process.stdin.write(CTRL_C)
                launcher.process.stdin.flush()

    def end_where_one_cannot_begin(self) -> str:
        """End node 0 if another machine could not start and node 0, which waits for it, has not reported that; return
        why.
        """
        due = time.monotonic() - GRACE_SECONDS
        dead = next(
            (launcher for launcher in self.launchers[1:] if launcher.code() and (launcher.ended_at or due) < due), None
        )
        if dead is None or self.stop.requested or STARTS.intersection(self.events()[self.before :]):
            return ""
        self.launchers[0].process.terminate()
        code = dead.process.returncode
        why = trouble(dead.host, code, dead.error).text if code in CANNOT_START else dead.error or f"code {code}"
        return f"host `{dead.host.name}`: {why}"

    def say_how_it_ended(self, problem: str) -> int:
        """Print what node 0 cannot know, and return the exit code."""
        code, output = self.launchers[0].process.returncode, self.launchers[0].process.stdout
        result = output.read().decode(errors="replace") if output else ""
        if self.stop.requested:
            code = code if code >= 0 else stop_code(self.stop.signals[0])
        elif problem or code < 0:
            problem = problem or f"host `{self.inventory.master.name}`: its launcher was killed by signal {-code}"
            code = LOST if code < 0 else HardwareError.exit_code
            tell(f"\nerror: {problem}")
            result = json.dumps({"run": str(self.run.path), "code": code, "error": problem}) + "\n"
        if code in (LOST, 130, 143) and self.run.plan.is_file():
            tell(f"hint: resume it with: {command(self.inventory, self.run)}")
        print(result if self.call.json else "", end="")
        return code

    def bring_checkpoints(self) -> None:
        """Copy the newest checkpoint to the others whenever node 0 restarts."""
        restarts = sum(event in (RECOVERED, RESTARTED) for event in self.events()[self.before :])
        if restarts > self.restarts and not self.shared:
            for rank, launcher in enumerate(self.launchers[1:], start=1):
                threading.Thread(target=self.bring_checkpoint, args=(rank, launcher), daemon=True).start()
        self.restarts = restarts

    def bring_checkpoint(self, rank: int, launcher: Launcher) -> None:
        """Copy the newest checkpoint to one machine as soon as it can be reached."""
        host, facts, folder = launcher.host, self.facts[launcher.host.name], self.run
        wish = f"{facts.runs}/{folder.name}/.fetch-node{rank}"
        while launcher.code() is None and self.launchers[0].code() is None:
            with contextlib.suppress(UserError):
                bring.send_run(host, facts, folder, newest_valid(folder)[0])
                ask(host, ["sh", "-c", RELEASE, "sh", wish], "its launcher asks for no checkpoint")
                return
            time.sleep(POLL_SECONDS)


# ---- The ordinary commands, on each machine


def status(call: Call) -> int:
    """Run `make cluster-status`: `make runs` on each machine; return 3 if one cannot be reached."""
    inventory = inventory_for_call(call)
    words = ["runs", *(["JSON=1"] if call.json else [])]
    answers = on_all(inventory.hosts, lambda host: answer_of(host, words))
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, UserError)}
    if call.json:
        rows = []
        for host in inventory.hosts:
            place, answer = {"host": host.name, "address": host.address}, answers[host.name]
            if isinstance(answer, UserError):
                rows.append({**place, "state": "unreachable", "error": answer.message, "hint": answer.hint})
            else:
                rows += [{**place, **row} for row in json.loads(answer.stdout)]
        print(json.dumps(rows))
    else:
        show(answers)
        for error in errors.values():
            tell(f"\n{error.render()}")
    return HardwareError.exit_code if errors else 0


def logs(call: Call) -> int:
    """Run `make cluster-logs RUN= RANK= FOLLOW=1`: `make logs` on the rank's machine."""
    inventory, folder, shared = _run_of(call)
    rank = call.integer("RANK") or 0
    counts = last_plan(folder).ranks_by_node
    ends = [sum(counts[: node + 1]) for node in range(len(counts))]
    host = next((host for host, end in zip(inventory.hosts, ends, strict=False) if rank < end), inventory.master)
    words = ["logs", f"RUN={folder.name}", f"RANK={rank}"]
    words += [f"{name}={call.options[name]}" for name in ("FOLLOW", "JSON") if name in call.options]
    argv = arguments(host, program(host, words, shared))
    with start(argv, stdin=subprocess.DEVNULL, preexec_fn=bind_to_parent(signal.SIGTERM)) as process:
        code = process.wait()
    return HardwareError.exit_code if code == SSH_FAILED else code


def stop(call: Call) -> int:
    """Run `make cluster-stop RUN=`: `make stop` on each machine; return the master's exit code."""
    inventory, folder, shared = _run_of(call)
    words = ["stop", f"RUN={folder.name}", *(["JSON=1"] if call.json else [])]
    answers = on_all(inventory.hosts, lambda host: answer_of(host, words, shared, timeout=3600))
    own = answers[inventory.master.name]
    if isinstance(own, UserError):
        raise own
    if call.json:
        print(own.stdout, end="")
    else:
        show(
            {name: answer for name, answer in answers.items() if answer is own or getattr(answer, "returncode", 1) == 0}
        )
    if own.returncode == 0:
        tell(f"hint: resume it with: {command(inventory, folder)}")
    return own.returncode


def _run_of(call: Call) -> tuple[Inventory, RunFolder, dict[str, str]]:
    """Return the inventory, the run that `RUN` names, and the variables of shared folders."""
    require_master_here(inventory := inventory_for_call(call))
    folder = find_named_run(call)
    return inventory, folder, shared_folders(read_facts(folder.config)["config"]["data"]["sync"])


Output = subprocess.CompletedProcess[str]


def answer_of(host: Host, words: Sequence[str], shared: Mapping[str, str] = {}, timeout: float = 60) -> Output:
    """Run a command on one machine and return its output. Raise `HardwareError` if it could not be started."""
    code, out, err = run(arguments(host, program(host, words, shared)), timeout=timeout)
    if code in (1, TIMED_OUT, *CANNOT_START):
        why = trouble(host, code, err)
        raise failed(host, why.text, why.remedy)
    return Output(words, code, out.decode(errors="replace"), err)


def show(answers: Mapping[str, Output | UserError]) -> None:
    """Print the output of the machines' commands, with the host's name before each line."""
    for name, answer in answers.items():
        if not isinstance(answer, UserError):
            for stream, text in ((sys.stdout, answer.stdout), (sys.stderr, answer.stderr)):
                print(
                    *(f"{name} | {printable(line)}\n" for line in text.splitlines() if line),
                    sep="",
                    end="",
                    file=stream,
                )
