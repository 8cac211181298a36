"""Brings code, model, prepared data and checkpoints to the machines of a cluster by rsync over SSH: only what a machine lacks.

Of the code goes what git tracks, as it stands in the working tree. Files of a person that stand there are never replaced (`transfer`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import sft_play
from sft_play.cluster.agent import ask
from sft_play.cluster.facts import Facts
from sft_play.cluster.transfer import Listing, deliver, digests, remote, rsync
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError, UserError
from sft_play.files import text_sha256
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.runs.inside import require_plain
from sft_play.runs.prepared import Prepared

if TYPE_CHECKING:
    from sft_play.config.schema import Config

SENT = ".cache/sft-play-sent"
"""In the project's folder of a machine, where git ignores it: what was brought, as `sha256sum -z` writes it, and after ` *` what was seen."""
SECRETS = (".env", ".netrc")
NOTICED = ("sft_play/", "configs/")
"""Where a file that is not tracked yet was probably meant to be sent."""
INVENTORIES = "configs/clusters/"
"""Read on the master only: one of your own stays there, and needs no commit."""
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""What another machine needs of a run to go on with it, beside a checkpoint."""


def project() -> Path:
    """Returns the folder of this project: what is trained with."""
    return Path(sft_play.__file__).resolve().parent.parent


def code_files(say: Callable[[str], None] | None = None) -> list[str]:
    """Returns the project's files that git tracks and that are there, relative to its folder; no `.env`, and none of the folder of runs.

    `say` is told how many files stay behind since they are not tracked, inventories left out. Raises `UserError` where it is no git checkout,
    or one in which nothing was added.
    """
    place, runs = project(), runs_folder().absolute()
    names = [
        name
        for name in _listed("--cached")
        if not _is_secret(name)
        and not (place / name).is_relative_to(runs)
        and ((place / name).is_file() or (place / name).is_symlink())
    ]
    if not names:
        raise UserError(
            f"git tracks no file of `{place}`, so what belongs to the project is not known", hint="git add, git commit there"
        )
    new = _listed("--others", "--exclude-standard") if say else []
    behind = [name for name in new if name.startswith(NOTICED) and not name.startswith(INVENTORIES)]
    if say and behind:
        count = "a file" if len(behind) == 1 else f"{len(behind)} files"
        say(
            f"note: {count} that git does not track yet (`{behind[0]}`) stay{'s' if len(behind) == 1 else ''} here; git add sends them"
        )
    return names


def _is_secret(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last in SECRETS or (last.startswith(".env.") and not last.endswith((".example", ".sample", ".template")))


def _listed(*options: str) -> list[str]:
    """Returns what `git ls-files` lists in the project; a name that is not UTF-8 as the system gives it to Python."""
    words = ["git", "-C", str(project()), "ls-files", "-z", *options]
    try:
        done = subprocess.run(words, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise HardwareError("there is no `git` on this machine", hint="apt install git") from error
    if done.returncode:
        last = next(iter(reversed(done.stderr.decode(errors="replace").strip().splitlines())), "")
        raise UserError(
            f"`{project()}` is no git checkout, so what belongs to the project is not known: {last}",
            hint="git init, git add, git commit there",
        )
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


def send_code(host: Host, inventory: Inventory, files: Sequence[str], *, tidy: bool = True) -> None:
    """Makes the project on `host` the same as here. Raises `UserError` where a person's own work would be lost (`transfer.deliver`)."""
    hint = "another `folder` in the inventory; or commit and move them away there, and type the same command again"
    missing = (
        f"where an earlier version of this command brought them, it left no such list: on it, mv {host.folder} {host.folder}.old, and here "
        f"make cluster-install CLUSTER={inventory.path}"
    )
    deliver(host, inventory, project(), host.folder, files, Listing(f"{host.folder}/{SENT}", hint, missing))
    if tidy:
        tidy_code(host, inventory, files)


def tidy_code(host: Host, inventory: Inventory, files: Sequence[str]) -> None:
    """Removes from `host` what an earlier call brought, is unchanged there, and is no longer part of the project."""
    mark = project() / ".cache" / f"seen-{secrets.token_hex(8)}"
    try:
        mark.parent.mkdir(exist_ok=True)
        mark.touch()  # a machine that sees it has this very folder, and nothing of it is to be removed
        seen = str(mark.relative_to(project()))
        now = dict.fromkeys(files, "") | digests(project(), files)
        ask(host, inventory, "tidy_code", timeout=60, files=now, listing=SENT, mark=seen)
    except OSError as error:
        raise HardwareError(f"cannot be written: {error.strerror}", place=str(error.filename)) from error
    finally:
        mark.unlink(missing_ok=True)


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
            _send_model(host, inventory, facts, Path(here), there, hub)
    splits = []
    for split in (prepared.train, prepared.validation):
        there = place_there(Path(split.path), facts, hub) if split else ""
        if split and not facts.shares_cache:
            rows = Path(split.path)
            names = sorted(str(path.relative_to(rows)) for path in rows.rglob("*") if path.is_file())
            deliver(host, inventory, rows, there, names, None)  # its name is made of its content
        splits.append(replace(split, path=there) if split else None)
    moved = replace(prepared.model, path=folders[str(model)])
    return Prepared(model=moved, train=splits[0], validation=splits[1])


def _send_model(host: Host, inventory: Inventory, facts: Facts, folder: Path, there: str, hub: Path) -> None:
    """Brings a model's folder; of one in the hub's cache also what its links point to, and which commit its branch is where none is known."""
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
        deliver(host, inventory, root, str(above), names, _brought(facts, str(above)), spared=["refs/"])
        return
    require_plain(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not _is_secret(path.name))
    deliver(host, inventory, folder, there, names, _brought(facts, there), options=["-L"])


def _brought(facts: Facts, there: str) -> Listing:
    hint = "it is another model: move it away there, or keep yours in a folder of another name here"
    return Listing(f"{facts.cache}/cluster/brought-{text_sha256(facts.host + there)[:16]}", hint)


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
    names = [name for name in RUN_FILES if (run.path / name).is_file()]
    if checkpoint is not None:
        states = run.random_states(step_of(checkpoint))
        names += [str(folder.relative_to(run.path)) for folder in (checkpoint, states) if folder.is_dir()]
    deliver(host, inventory, run.path, there, names, None, options=["-r"])
    ask(host, inventory, "one_checkpoint", timeout=60, run=run.name, step=step_of(checkpoint) if checkpoint else None)


def fetch_random_states(host: Host, inventory: Inventory, facts: Facts, run: RunFolder, checkpoint: Path) -> None:
    """Brings the random states of the ranks of `host` at the step of a checkpoint, so that other machines can go on with them."""
    if facts.shares_runs:
        return
    own = run.random_states(step_of(checkpoint))
    own.mkdir(parents=True, exist_ok=True)
    source = f"{facts.runs}/{run.name}/random/{own.name}/"
    try:
        rsync(host, inventory, ["--ignore-missing-args", "--no-links", "--no-D", remote(host, source), f"{own}/"], timeout=120)
    finally:
        if not any(own.iterdir()):
            own.rmdir()
