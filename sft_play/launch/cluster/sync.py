"""Brings code, model, prepared data and checkpoints to the machines of a cluster by rsync over SSH: only what a machine lacks.

Of the code goes what git knows: tracked files, and new ones that it does not ignore. No path is interpreted by a shell over there
(`--secluded-args`), and host keys are checked as everywhere.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import sft_play
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError, UserError
from sft_play.launch.cluster.agent import ask
from sft_play.launch.cluster.children import waited_for
from sft_play.launch.cluster.facts import Facts
from sft_play.launch.cluster.ssh import SSH_FAILED, TIMED_OUT, arguments, no_client, run_on, trouble
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared

if TYPE_CHECKING:
    from sft_play.config.schema import Config

SECONDS = 6 * 3600.0
"""The longest time of one transfer: a large model over a slow network."""
MAKE_FOLDER = 'case "$1" in "~/"*) f="$HOME/${1#"~/"}";; *) f="$1";; esac; mkdir -p -- "$f"'
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""What another machine needs of a run to go on with it, beside a checkpoint."""


def project() -> Path:
    """Returns the folder of this project: what is trained with."""
    return Path(sft_play.__file__).resolve().parent.parent


def code_files() -> list[str]:
    """Returns the project's files that git knows, relative to its folder. Raises `UserError` where it is no git checkout."""
    words = ["git", "-C", str(project()), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise HardwareError("there is no `git` on this machine", hint="apt install git") from error
    if done.returncode:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "")
        raise UserError(
            f"`{project()}` is no git checkout, so what belongs to the project is not known: {last}",
            hint="git init, git add, git commit there",
        )
    names = sorted({name for name in done.stdout.split("\0") if name})
    return [name for name in names if (project() / name).is_file() or (project() / name).is_symlink()]


def send_code(host: Host, inventory: Inventory, files: Sequence[str], *, tidy: bool = True) -> None:
    """Makes the project on `host` the same as here. `tidy` removes what an earlier call brought and is no longer part of it."""
    make_folder(host, inventory, host.folder)
    _rsync(host, inventory, ["--from0", "--files-from=-", f"{project()}/", _there(host, f"{host.folder}/")], names=files)
    if tidy:
        ask(host, inventory, "tidy_code", timeout=60, files=list(files))


def make_folder(host: Host, inventory: Inventory, folder: str) -> None:
    """Makes a folder on `host`, with those above it. Raises `HardwareError`."""
    done = run_on(host, inventory, ["sh", "-c", MAKE_FOLDER, "sh", folder], timeout=30)
    if done.code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, inventory, done.stderr)
        raise HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)
    if done.code:
        last = next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.code}")
        raise HardwareError(f"host `{host.name}`: `{folder}` cannot be made: {last}", place=host.place or None)


# ---- Model and data


def place_there(path: Path, facts: Facts, hub: Path) -> str:
    """Returns where `path` of this machine stands on another: in the same place of its cache, hub cache, project or home, else at the same path."""
    path = path.absolute()
    roots = [
        (cache_folder().absolute(), facts.cache),
        (hub, facts.hub),
        (Path.cwd(), facts.folder or facts.home),
        (Path.home(), facts.home),
    ]
    for here, there in roots:
        for root, tried in ((here, path), (here.resolve(), path.resolve())):
            if tried.is_relative_to(root):
                return str(Path(there) / tried.relative_to(root))
    return str(path)


def send_prepared(host: Host, inventory: Inventory, facts: Facts, config: Config, prepared: Prepared, hub: Path) -> Prepared:
    """Brings model and prepared rows to `host`; returns where they stand there."""
    model = Path(prepared.model.path)
    folders = {str(model): place_there(model, facts, hub)}
    for name in (config.model.name, config.model.tokenizer):
        if name and (folder := Path(name).expanduser()).is_dir():
            folders[str(folder.absolute())] = place_there(folder, facts, hub)
    if not (facts.shares_cache and model.is_relative_to(cache_folder().absolute())):
        for here, there in folders.items():
            _send_model(host, inventory, Path(here), there, hub)
    splits = []
    for split in (prepared.train, prepared.validation):
        there = place_there(Path(split.path), facts, hub) if split else ""
        if split and not facts.shares_cache:
            make_folder(host, inventory, there)
            _rsync(host, inventory, [f"{split.path}/", _there(host, f"{there}/")])
        splits.append(replace(split, path=there) if split else None)
    moved = replace(prepared.model, path=folders[str(model)])
    return Prepared(model=moved, train=splits[0], validation=splits[1])


def _send_model(host: Host, inventory: Inventory, folder: Path, there: str, hub: Path) -> None:
    """Brings a model's folder; of one in the hub's cache also what its links point to, and which commit its branch is."""
    if folder.is_relative_to(hub):
        repository = hub / folder.relative_to(hub).parts[0]
        above = Path(there)
        for _ in folder.relative_to(repository).parts:
            above = above.parent
        files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
        files += [path.resolve() for path in files if path.is_symlink() and path.resolve().is_relative_to(repository.resolve())]
        files += [path for path in (repository / "refs").rglob("*") if path.is_file()]
        root = repository.resolve()
        names = sorted({str(_inside(path, repository, root)) for path in files})
        make_folder(host, inventory, str(above))
        _rsync(host, inventory, ["--from0", "--files-from=-", f"{root}/", _there(host, f"{above}/")], names=names)
        return
    make_folder(host, inventory, there)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    _rsync(host, inventory, ["-L", "--from0", "--files-from=-", f"{folder}/", _there(host, f"{there}/")], names=names)


def _inside(path: Path, repository: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else path.relative_to(repository)


def prepared_text(prepared: Prepared) -> str:
    """Returns `prepared.json` for a machine."""
    return json.dumps(asdict(prepared), indent=2, ensure_ascii=False)


# ---- Runs


def send_run(host: Host, inventory: Inventory, facts: Facts, run: RunFolder, checkpoint: Path | None) -> None:
    """Brings what `host` needs to go on with a run from `checkpoint`. Newer checkpoints there are set aside."""
    if facts.shares_runs:
        return
    there = f"{facts.runs}/{run.name}"
    make_folder(host, inventory, there)
    names = [name for name in RUN_FILES if (run.path / name).is_file()]
    if checkpoint is not None:
        states = run.random_states(step_of(checkpoint))
        names += [str(folder.relative_to(run.path)) for folder in (checkpoint, states) if folder.is_dir()]
    words = ["-r", "--from0", "--files-from=-", f"{run.path}/", _there(host, f"{there}/")]
    _rsync(host, inventory, words, names=names)
    ask(host, inventory, "one_checkpoint", timeout=60, run=run.name, step=step_of(checkpoint) if checkpoint else None)


def fetch_random_states(host: Host, inventory: Inventory, facts: Facts, run: RunFolder, checkpoint: Path) -> None:
    """Brings the random states of the ranks of `host` at the step of a checkpoint, so that other machines can go on with them."""
    if facts.shares_runs:
        return
    own = run.random_states(step_of(checkpoint))
    own.mkdir(parents=True, exist_ok=True)
    source = f"{facts.runs}/{run.name}/random/{own.name}/"
    try:
        _rsync(host, inventory, ["--ignore-missing-args", _there(host, source), f"{own}/"], timeout=120)
    finally:
        if not any(own.iterdir()):
            own.rmdir()


# ---- rsync


def _there(host: Host, path: str) -> str:
    """Returns a path on `host` as rsync takes it; `~/` is where it starts anyway."""
    name = host.ssh or host.address
    return f"{f'[{name}]' if ':' in name else name}:{path.removeprefix('~/')}"


def _rsync(
    host: Host, inventory: Inventory, words: Sequence[str], *, names: Sequence[str] = (), timeout: float = SECONDS
) -> None:
    """Runs rsync; `names` are its list of files. Raises `HardwareError` with what it says."""
    shell = shlex.join(arguments(host, inventory, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "--secluded-args", "--timeout=60", "-e", shell, *words]
    text = "\0".join(names) if names else None
    try:
        code, said = _run(argv, text, timeout)
    except FileNotFoundError as error:
        missing = error.filename == "rsync"
        raise (
            HardwareError("there is no `rsync` on this machine", hint="apt install rsync") if missing else no_client()
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"host `{host.name}`: rsync took longer than {timeout:.0f} s", place=host.place or None) from error
    if code == SSH_FAILED:
        why = trouble(host, inventory, said)
        raise HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)
    if code:
        lines = [line for line in said.strip().splitlines() if not line.startswith("rsync error:")] or [f"exit code {code}"]
        hint = "on it: sudo apt install rsync" if "not found" in said else None
        raise HardwareError(f"host `{host.name}`: rsync failed: {lines[-1]}", place=host.place or None, hint=hint)


def _run(argv: Sequence[str], text: str | None, timeout: float) -> tuple[int, str]:
    """Runs a program to its end; returns its code and what it said on stderr. Raises `subprocess.TimeoutExpired`."""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace",
    ) as process, waited_for(process):  # fmt: skip
        try:
            _, said = process.communicate(text, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return process.returncode, said
