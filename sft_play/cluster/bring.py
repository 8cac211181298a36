"""Brings code, model, prepared data and checkpoints to the machines of a cluster by rsync over SSH: only what a machine lacks.

Of the code goes what git tracks, as it stands in the working tree. A folder that we fill there bears a marker: in one without it no file that
differs is ever replaced, in one with it rsync sets aside what it replaces. Needs rsync and a shell there, no Python: the first call comes before
there is an environment.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import sft_play
from sft_play.cluster.board import say
from sft_play.cluster.hosts import Facts, ask
from sft_play.cluster.ssh import SSH_FAILED, TIMED_OUT, arguments, no_client, run, trouble
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError, UserError
from sft_play.files import text_sha256
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder, cache_folder, require_plain, runs_folder
from sft_play.runs.prepared import Prepared

if TYPE_CHECKING:
    from sft_play.config.schema import Config

SECONDS = 6 * 3600.0
"""The longest time of one transfer: a large model over a slow network."""
VANISHED = 24
"""rsync's exit code where files of the source were removed meanwhile."""
MOST_NAMED = 10
GIB = 2**30
MARKER = ".cache/sft-play-sent"
"""In the project's folder of a machine, where git ignores it: the names of the files that were brought, each with a NUL behind it."""
SET_ASIDE = ".cache/replaced"
SECRETS = (".env", ".netrc")
NOTICED = ("sft_play/", "configs/")
"""Where a file that is not tracked yet was probably meant to be sent."""
INVENTORIES = "configs/clusters/"
"""Read on the master only: one of your own stays there, and needs no commit."""
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""What another machine needs of a run to go on with it, beside a checkpoint."""
HOME = 'h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }; '
OPEN = HOME + (
    'd=$(h "$1"); m=$(h "$2"); mkdir -p -- "$d" && cd -- "$d" || exit 1; echo; df -Pk . | tail -n 1; '
    'if [ -e "$3" ]; then echo same; elif [ -e "$m" ]; then echo ours; elif [ -z "$(ls -A)" ]; then echo empty; else echo foreign; fi'
)
"""Takes a folder, its marker, and a file that stands in the folder where it is the one of the machine that asks."""
MARK = HOME + 'm=$(h "$1"); mkdir -p -- "${m%/*}" && : >>"$m"'
TIDY = HOME + (
    'd=$(h "$1"); cd -- "$d" || exit 1; cat >"$2.now" || exit 1; mkdir -p -- "$3" || exit 1; '
    'export LC_ALL=C; comm -z -13 <(sort -z "$2.now") <(sort -z "$2") | while IFS= read -r -d "" f; do case "/$f/" in */../*|//*) ;; '
    '*) [ -f "./$f" ] && mkdir -p -- "$(dirname -- "$3/$f")" && mv -- "./$f" "$3/$f";; esac; done; mv -f -- "$2.now" "$2"; '
    'rmdir -- "$3" 2>/dev/null; :'
)
"""Takes the project's folder, its marker, and where files that have left the project are set aside; reads the names of the project's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A file that rsync would send."""

    name: str
    size: int
    """Bytes."""
    new: bool
    """Nothing stands at its place there."""


def deliver(
    host: Host, inventory: Inventory, source: Path, there: str, names: Sequence[str], *, marker: str = "", hint: str = "", seen: str = "",
    aside: str = "", options: Sequence[str] = (), spared: str | None = None,
) -> bool:  # fmt: skip
    """Brings files of `source` (`names`, relative to it) into the folder `there` where they are missing or others there.

    With a `marker` (a path there) a folder that has none, and files of other content, is refused with their names and `hint`: `UserError`,
    and nothing is sent. What is replaced in a marked folder is set aside in `aside`, where that is given. Files whose names begin with `spared`
    stay as they are. `seen` names a file in `source` by which the folder is recognized as `source` itself: then nothing is done, and `False`
    returned. Raises `HardwareError` for a host that cannot be asked, or has no room.
    """
    if not names:
        return True
    disk, state = _lines(
        host, inventory, ["sh", "-c", OPEN, "sh", there, marker, seen or "/dev/null/none"], f"`{there}` cannot be made"
    )
    if state == "same":
        return False
    words = ["--from0", "--files-from=-", *options, f"{source}/", remote(host, f"{there}/")]

    def changes(*more: str) -> list[Change]:
        return [
            one for one in _changes(rsync(host, inventory, ["-n", "--out-format=%i %l %n", *more, *words], names=names))
            if spared is None or one.new or not one.name.startswith(spared)
        ]  # fmt: skip

    exactly = ["--checksum"] if marker and state == "foreign" else []
    found = changes(*exactly)
    if exactly:
        _refuse(host, there, [one.name for one in found if not one.new], hint)
    room = re.search(r"(\d+)\s+\d+%\s", disk)  # of `df -P`: available, capacity, mount point
    _require_room(host, there, sum(one.size for one in found), int(room[1]) * 1024 if room else 2**62)
    if marker and state != "ours":
        _ask(host, inventory, ["sh", "-c", MARK, "sh", marker], f"`{marker}` cannot be written")
    if not found and not exactly:
        return True
    kept = {one.name for one in found} if spared is not None else set(names)
    backup = ["--backup", f"--backup-dir={aside}"] if aside else []
    rsync(host, inventory, ["--partial", *exactly, *backup, *words], names=[name for name in names if name in kept])
    if aside and (replaced := [one.name for one in found if not one.new]):
        say(f"host `{host.name}`: {_shown(replaced)} replaced; what stood there is in `{there}/{aside}`")
    return True


def _lines(host: Host, inventory: Inventory, words: Sequence[str], what: str) -> tuple[str, str]:
    """Returns the last two lines of what a command on `host` prints, without what a login script prints before."""
    lines = _ask(host, inventory, words, what).decode(errors="replace").splitlines()
    if len(lines) < 2:
        raise HardwareError(f"host `{host.name}`: {what}: its shell said nothing", place=host.place or None)
    return lines[-2], lines[-1]


def _require_room(host: Host, there: str, size: int, free: int) -> None:
    if size > free:
        raise HardwareError(
            f"host `{host.name}`: {size / GIB:.2f} GiB are to be brought to `{there}`, and its disk has {free / GIB:.2f} GiB free",
            place=host.place or None, hint="make room there (RUNS_DIR, SFT_PLAY_CACHE and HF_HOME of that machine move its folders)",
        )  # fmt: skip


def _refuse(host: Host, there: str, names: Sequence[str], hint: str) -> None:
    if names:
        what = (
            "a file is another one than here and was" if len(names) == 1 else f"{len(names)} files are others than here and were"
        )
        text = f"host `{host.name}`: in `{there}` {what} not brought by this command: {_shown(names)}"
        raise UserError(text, place=host.place or None, hint=hint)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"`{name}`" for name in sorted(names)[:MOST_NAMED]) + more


def _ask(host: Host, inventory: Inventory, words: Sequence[str], what: str, text: bytes | None = None) -> bytes:
    """Runs a command on `host` and returns what it printed. Raises `HardwareError`, with `what` that means."""
    try:
        code, out, said = run(arguments(host, inventory, words), text, 60)
    except FileNotFoundError:
        raise no_client() from None
    if code in (SSH_FAILED, TIMED_OUT):
        raise _unreached(host, inventory, said)
    if code:
        last = last_line(said) or f"exit code {code}"
        raise HardwareError(f"host `{host.name}`: {what}: {last}", place=host.place or None, hint=_room(said))
    return out


def _unreached(host: Host, inventory: Inventory, said: str) -> HardwareError:
    why = trouble(host, inventory, said)
    return HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)


# ---- rsync


def remote(host: Host, path: str) -> str:
    """Returns a path on `host` as rsync takes it, without `.`, `..` and double slashes; `~/` is where it starts anyway."""
    name, end = host.ssh or host.address, "/" if path.endswith("/") else ""
    plain = posixpath.normpath(
        path[1:].lstrip("/") or "." if path.startswith("~/") else f"/{path.lstrip('/')}" if path[:1] == "/" else path
    )
    return f"{f'[{name}]' if ':' in name else name}:{plain if plain == '/' else plain + end}"


def rsync(
    host: Host, inventory: Inventory, words: Sequence[str], *, names: Sequence[str] = (), timeout: float = SECONDS
) -> bytes:
    """Runs rsync and returns what it prints; `names` are its list of files, in which `#` and `;` begin a comment. Raises `HardwareError` with what it
    says."""
    shell = shlex.join(arguments(host, inventory, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "-s", "--timeout=60", "-e", shell, *words]
    try:
        code, out, said = run(
            argv, joined(f"./{name}" if name[0] in "#;" else name for name in names) if names else None, timeout
        )
    except FileNotFoundError:
        raise HardwareError("there is no `rsync` on this machine", hint="apt install rsync") from None
    if code == SSH_FAILED:
        raise _unreached(host, inventory, said)
    if code not in (0, VANISHED):
        hint = "on it: sudo apt install rsync" if "not found" in said else _room(said)
        raise HardwareError(
            f"host `{host.name}`: rsync failed: {last_line(said) or f'exit code {code}'}", place=host.place or None, hint=hint
        )
    return out


def last_line(said: str) -> str:
    """Returns the line of a program's words that says most: a full disk before what followed from it, else the last that is no summary."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    full = next((line for line in lines if "No space left" in line or "quota exceeded" in line.lower()), None)
    return full or next((line for line in reversed(lines) if not line.startswith("rsync error:")), lines[-1] if lines else "")


def _room(said: str) -> str | None:
    return "make room on its disk, and type the same command again" if "No space left" in said else None


def _changes(out: bytes) -> list[Change]:
    """Returns the files that a dry run of rsync names, by `--out-format=%i %l %n`; not folders, nor times and modes alone."""
    changes = []
    for line in out.split(b"\n"):
        match = re.fullmatch(rb"([<>c][fL]\S{9,}) (\d+) (.+)", line)
        if match:
            name = re.sub(rb"\\#(\d{3})", lambda found: bytes([int(found[1], 8)]), match[3])
            changes.append(Change(name=os.fsdecode(name), size=int(match[2]), new=match[1][2:].startswith(b"+++")))
    return changes


def joined(names: Iterable[str]) -> bytes:
    """Returns names of files as rsync reads them; on Linux a name need not be UTF-8."""
    return b"".join(os.fsencode(name) + b"\0" for name in names)


# ---- Code


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


def send_code(host: Host, inventory: Inventory, files: Sequence[str]) -> None:
    """Makes the project on `host` the same as here; what is replaced or has left the project is set aside. Raises as `deliver`."""
    hint = "another `folder` in the inventory; or commit and move them away there, and type the same command again"
    aside, seen = f"{SET_ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}", project() / ".cache" / f"seen-{secrets.token_hex(8)}"
    try:
        seen.parent.mkdir(exist_ok=True)
        seen.touch()
        another = deliver(
            host, inventory, project(), host.folder, files, marker=f"{host.folder}/{MARKER}", hint=hint, aside=aside,
            seen=str(seen.relative_to(project())),
        )  # fmt: skip
    except OSError as error:
        raise HardwareError(f"cannot be written: {error.strerror}", place=str(error.filename)) from error
    finally:
        seen.unlink(missing_ok=True)
    if not another:
        return
    words = ["bash", "-c", TIDY, "bash", host.folder, MARKER, aside]
    _ask(host, inventory, words, f"`{host.folder}` cannot be tidied", joined(files))


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
            send_model(host, inventory, facts, Path(here), there, hub)
    splits = []
    for split in (prepared.train, prepared.validation):
        there = place_there(Path(split.path), facts, hub) if split else ""
        if split and not facts.shares_cache:
            rows = Path(split.path)
            names = sorted(str(path.relative_to(rows)) for path in rows.rglob("*") if path.is_file())
            deliver(host, inventory, rows, there, names)  # its name is made of its content
        splits.append(replace(split, path=there) if split else None)
    moved = replace(prepared.model, path=folders[str(model)])
    return Prepared(model=moved, train=splits[0], validation=splits[1])


def send_model(host: Host, inventory: Inventory, facts: Facts, folder: Path, there: str, hub: Path) -> None:
    """Brings a model's folder; of one in the hub's cache also what its links point to, and which commit its branch is where none is known."""
    hint = "it is another model: move it away there, or keep yours in a folder of another name here"

    def send(source: Path, place: str, names: Sequence[str], options: Sequence[str], spared: str | None) -> None:
        marker = f"{facts.cache}/cluster/brought-{text_sha256(facts.host + place)[:16]}"
        deliver(host, inventory, source, place, names, marker=marker, hint=hint, options=options, spared=spared)

    if not folder.is_relative_to(hub):
        require_plain(folder)
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and not _is_secret(path.name))
        return send(folder, there, names, ["-L"], None)
    repository = hub / folder.relative_to(hub).parts[0]
    above = Path(there).parents[len(folder.relative_to(repository).parts) - 1]
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    files += [path.resolve() for path in files if path.is_symlink() and path.resolve().is_relative_to(repository.resolve())]
    files += [path for path in (repository / "refs").rglob("*") if path.is_file()]
    root = repository.resolve()
    inside = {str(path.relative_to(root if path.is_relative_to(root) else repository)) for path in files}
    return send(root, str(above), sorted(inside), [], "refs/")


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
    deliver(host, inventory, run.path, there, names, options=["-r", "--ignore-missing-args"])  # it may be rotated away meanwhile
    ask(host, inventory, "one_checkpoint", timeout=60, run=run.name, step=step_of(checkpoint) if checkpoint else None)


def fetch_random_states(host: Host, inventory: Inventory, facts: Facts, run: RunFolder, checkpoint: Path, seconds: float) -> None:
    """Brings the random states of the ranks of `host` at the step of a checkpoint, so that other machines can go on with them."""
    if facts.shares_runs:
        return
    own = run.random_states(step_of(checkpoint))
    own.mkdir(parents=True, exist_ok=True)
    source = f"{facts.runs}/{run.name}/random/{own.name}/"
    try:
        rsync(
            host, inventory, ["--ignore-missing-args", "--no-links", "--no-D", remote(host, source), f"{own}/"], timeout=seconds
        )
    finally:
        if not any(own.iterdir()):
            own.rmdir()
