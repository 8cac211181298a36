"""Copy code, environment, model, prepared data and checkpoints to the machines of a cluster: only what a machine lacks,
with rsync over SSH.

Of the code goes what git tracks, as it is in the working tree. A folder that we fill there has a marker: in one without
it no file that differs is ever replaced, in one with it rsync sets aside what it replaces. Needs rsync and a shell
there, no Python: the first call comes before there is an environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import sft_play
from sft_play.cluster.check import Facts, ask_doctor, mark_in, other_versions, versions_remedy
from sft_play.cluster.inventory import Host, inventory_for_call, plain_path
from sft_play.cluster.ssh import (
    HOME,
    IN_FOLDER,
    arguments,
    ask,
    failed,
    is_here,
    last_word,
    login,
    on_all,
    relay,
    require_done,
    require_master_here,
    run,
    start,
)
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.files import text_sha256
from sft_play.plan.hardware import GIB
from sft_play.runs.folder import RunFolder, cache_folder, hub_cache, require_plain, runs_folder
from sft_play.runs.prepared import Prepared
from sft_play.text import bar, list_some, plural, tell

SECONDS = 6 * 3600.0
"""Time limit of one transfer, which may be a large model over a slow network."""
VANISHED = 24
"""rsync's exit code when source files were removed during the transfer."""
MOST_NAMED = 10
MARKER = ".cache/sft-play-sent"
"""Marker in a machine's project folder, ignored by git: the names of the files that were sent, each followed by a NUL.
"""
SET_ASIDE = ".cache/replaced"
SECRETS = (".env", ".netrc")
NOTICED = ("sft_play/", "configs/")
"""Folders whose untracked files the user probably meant to send."""
INVENTORIES = "configs/clusters/"
"""Only the master reads inventories, so a user's own one need not be committed."""
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""Files of a run, besides a checkpoint, that another machine needs to continue it."""
OPEN = (
    HOME + 'd=$(h "$1"); m=$(h "$2"); mkdir -p -- "$d" && cd -- "$d" || exit 1; df -Pk . | tail -n 1; if [ -e "$m" ];'
    ' then echo ours; elif [ -z "$(ls -A)" ]; then echo empty; else echo foreign; fi'
)
"""Arguments: a folder and its marker. Prints the free space, and whether the folder is ours, empty or foreign."""
READ = HOME + 'f=$(h "$1"); if [ -e "$f/.cache/$3" ]; then printf same; elif [ -e "$f/$2" ]; then cat "$f/$2"; fi'
"""Arguments: a project's folder, its marker, and the name of a file that only this machine's own folder contains."""
MARK = HOME + 'm=$(h "$1"); mkdir -p -- "${m%/*}" && cat >"$m"'
"""Argument: a marker; its content is on stdin."""
MOVE = HOME + (
    'cd -- "$(h "$1")" && mkdir -p -- "$2" && xargs -0 sh -c \'for f; do [ ! -f "$f" ] || { mkdir -p -- "$0/$(dirname'
    ' -- "$f")" && mv -- "$f" "$0/$f"; }; done\' "$2"'
)
"""Arguments: a folder and a folder inside it; the names of the files to move there are on stdin."""


def deliver(
    host: Host,
    source: Path,
    there: str,
    names: Sequence[str],
    *,
    marker: str = "",
    hint: str = "",
    aside: str = "",
    options: Sequence[str] = (),
) -> None:
    """Copy `names` of the folder `source` to the folder `there` if they are missing or different there.

    With a `marker` (a path there), an unmarked folder with files of other content is refused before anything is sent:
    `UserError` with their names and `hint`. Files replaced in a marked folder are moved to `aside`, if it is set. Raise
    `HardwareError` for a host that cannot be reached or whose disk is full.
    """
    if not names:
        return
    disk, state = ask(host, ["sh", "-c", OPEN, "sh", there, marker or "/"], f"`{there}` cannot be made").splitlines()[
        -2:
    ]
    foreign = state == "foreign"
    words = ["--from0", "--files-from=-", *(["--checksum"] if foreign else []), *options]
    words += [f"{source}/", remote(host, f"{there}/")]
    size, new, replaced = changes(rsync(host, ["-n", "--out-format=%i %l %n", *words], names=names))
    if foreign and replaced:
        count = plural(len(replaced), "file")
        text = f"host `{host.name}`: `{there}` has {count} that this command did not bring, and others than here"
        raise UserError(f"{text}: {_listed(replaced)}", place=host.place, hint=hint)
    room = re.search(r"(\d+)\s+\d+%\s", disk)  # of `df -P`: available, capacity, mount point
    free = int(room[1]) * 1024 if room else 2**62
    if size > free:
        text = f"{size / GIB:.2f} GiB are to be brought to `{there}`, and its disk has {free / GIB:.2f} GiB free"
        raise failed(
            host, text, "make room there (RUNS_DIR, SFT_PLAY_CACHE and HF_HOME of that machine move its folders)"
        )
    if marker and state != "ours":
        mark(host, marker, ())
    if new or replaced or foreign:  # for equal content only the times are copied, so that it is not read again
        backup = ["--backup", f"--backup-dir={aside}"] if aside else []
        with bar(f"to {host.name}", "MiB") as show:

            def show_bytes(out: bytes) -> None:
                if numbers := re.findall(rb"([\d,.]+) +\d+% ", out[-500:]):  # bytes so far, of all files
                    show(int(re.sub(rb"\D", b"", numbers[-1])) >> 20, size >> 20)

            rsync(host, ["--partial", "--info=progress2", *backup, *words], names=names, on_output=show_bytes)
    if aside and replaced:
        tell(f"host `{host.name}`: {_listed(replaced)} replaced; the old files are in `{there}/{aside}`")


def mark(host: Host, marker: str, names: Iterable[str]) -> None:
    """Write a marker with the names of the files that were sent."""
    ask(host, ["sh", "-c", MARK, "sh", marker], f"`{marker}` cannot be written", text=join_names(names))


def _listed(names: Sequence[str]) -> str:
    return list_some([f"`{name}`" for name in sorted(names)], MOST_NAMED)


# ---- rsync


def remote(host: Host, path: str) -> str:
    """Return a path on `host` as rsync takes it, without `~/`, where rsync starts anyway."""
    name, end = host.ssh or host.address, "/" if path.endswith("/") else ""
    plain = plain_path(path).removeprefix("~/")
    return f"{f'[{name}]' if ':' in name else name}:{plain if plain == '/' else plain + end}"


def rsync(
    host: Host,
    words: Sequence[str],
    *,
    names: Iterable[str] = (),
    timeout: float = SECONDS,
    on_output: Callable[[bytes], object] | None = None,
) -> bytes:
    """Run rsync and return its output; `names` is its list of files, where `#` and `;` would begin a comment.

    `on_output`: see `ssh.run`. Raise `HardwareError` with rsync's message.
    """
    shell = shlex.join(arguments(host, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "-s", "--timeout=60", "-e", shell, *words]
    text = join_names(f"./{name}" if name[0] in "#;" else name for name in names)
    code, out, err = run(argv, text or None, timeout, on_output=on_output)
    require_done(host, 0 if code == VANISHED else code, err, "rsync failed")
    return out


def changes(out: bytes) -> tuple[int, list[str], list[str]]:
    """Return the bytes, the new files and the replaced files of a dry run with `--out-format=%i %l %n`, without folders
    and changes of time or mode only.
    """
    size = 0
    new: list[str] = []
    replaced: list[str] = []
    for kind, length, name in re.findall(rb"^([<>c][fL]\S{9,}) (\d+) (.+)$", out, re.MULTILINE):
        plain = os.fsdecode(re.sub(rb"\\#(\d{3})", lambda letter: bytes([int(letter[1], 8)]), name))
        (new if kind[2:].startswith(b"+++") else replaced).append(plain)
        size += int(length)
    return size, new, replaced


def join_names(names: Iterable[str]) -> bytes:
    """Return file names as rsync reads them; on Linux a name need not be UTF-8."""
    return b"".join(os.fsencode(name) + b"\0" for name in names)


# ---- Code


def project() -> Path:
    """Return the folder of the project that this process runs from."""
    return Path(sft_play.__file__).resolve().parent.parent


def code_files() -> list[str]:
    """Return the existing files that git tracks, relative to the project's folder, without `.env` and the folder of
    runs.

    Print which untracked files are not sent, apart from inventories. Raise `UserError` if the folder is not a git
    checkout or tracks nothing.
    """
    place, runs = project(), runs_folder().absolute()
    paths = {name: place / name for name in _git_files("--cached") if not _is_secret(name)}
    new = _git_files("--others", "--exclude-standard")
    if behind := [name for name in new if name.startswith(NOTICED) and not name.startswith(INVENTORIES)]:
        tell(f"note: not sent, because git does not track it: {_listed(behind)}; `git add` sends them")
    return [n for n, path in paths.items() if not path.is_relative_to(runs) and (path.is_file() or path.is_symlink())]


def _is_secret(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last in SECRETS or (last.startswith(".env.") and not last.endswith((".example", ".sample", ".template")))


def _git_files(*options: str) -> list[str]:
    """Return what `git ls-files` lists in the project, with names decoded as Python decodes paths."""
    place = project()
    code, out, err = run(["git", "-C", str(place), "ls-files", "-z", *options], timeout=60)
    if code or not (out or "--cached" not in options):
        text = f"the other machines get the files that git tracks in `{place}`, and it tracks none"
        hint = "git clone the project, `make install` in the clone, and type the command there; in your own: git add"
        raise UserError(f"{text}: {last_word(err) or 'nothing was added'}", hint=hint)
    return sorted({os.fsdecode(name) for name in out.split(b"\0") if name})


def send_code(host: Host, files: Sequence[str]) -> None:
    """Update the project on `host` and move replaced and removed files aside. Raises as `deliver`."""
    hint = "another `folder` in the inventory; or commit and move them away there, and type the same command again"
    aside, marker = f"{SET_ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}", f"{host.folder}/{MARKER}"
    with mark_in(str(project() / ".cache")) as (seen,):  # on a shared disk it is this very folder
        before = ask(host, ["sh", "-c", READ, "sh", host.folder, MARKER, seen.name], f"`{marker}` cannot be read")
        if before == "same":
            return
        deliver(host, project(), host.folder, files, marker=marker, hint=hint, aside=aside)
    if gone := sorted(set(filter(None, before.split("\0"))) - set(files)):
        ask(host, ["sh", "-c", MOVE, "sh", host.folder, aside], "files cannot be moved", text=join_names(gone))
    mark(host, marker, files)


# ---- Environment


MAKE = (
    HOME
    + """v=$(h "$1")
for p in "python$2" "$v/bin/python" python3; do
  if [ "$("$p" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]; then
    exec make install VENV="$v" PYTHON="$p"
  fi
done
echo "error: there is no Python $2, which the first host has; python3 is $(python3 --version 2>&1)"
exit 97
"""
)
"""Takes the environment's folder and this machine's Python version."""
NO_PYTHON = 97


def install_all(call: Call) -> int:
    """Run `make cluster-install`: install the project and its environment on all machines in parallel; return 0 if all
    are ready, else 3.

    A repeated command continues: existing files are not sent again, and an environment newer than the pinned versions
    is not changed.
    """
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    files = code_files()
    for host in inventory.hosts:
        venv_of(host)  # an unusable environment is reported before anything is sent
    own = facts_of(inventory.master)
    done = on_all(inventory.hosts, lambda host: install(host, files, own))
    rows: list[dict[str, Any]] = []
    for name, result in done.items():
        error = result if isinstance(result, UserError) else None
        detail, hint = (error.message, error.hint) if error else (result, None)
        rows.append({"host": name, "ok": error is None, "detail": detail, "hint": hint})
        tell(f"{'failed' if error else 'ready'}  {name}: {detail}" + (f"\n        hint: {hint}" if hint else ""))
    if call.json:
        print(json.dumps(rows))
    if names := ", ".join(f"`{row['host']}`" for row in rows if not row["ok"]):
        hint = "fix the error above and repeat the command: finished work is kept"
        tell(f"\nerror: {names} cannot be used yet\n\nhint: {hint}")
    return HardwareError.exit_code if names else 0


def facts_of(host: Host) -> Facts:
    """Return one host's facts. Raise `HardwareError` if it cannot be reached."""
    answer = ask_doctor(host, {})
    if answer.facts is None:
        raise failed(host, answer.findings[0].text, answer.findings[0].remedy)
    return answer.facts


def venv_of(host: Host) -> str:
    """Return the environment's folder, derived from its interpreter. Raise `UserError` for an interpreter outside an
    environment.
    """
    python = PurePosixPath(host.python)
    if python.parent.name != "bin" or not python.name.startswith("python") or len(python.parts) < 3:
        text = f"host `{host.name}`: `python` is `{host.python}`, which is not an environment's interpreter"
        hint = "`.venv/bin/python` is made in its `folder`; fill your own environment yourself"
        raise UserError(text, place=host.place, hint=hint)
    return str(python.parent.parent)


def install(host: Host, files: Sequence[str], own: Facts) -> str:
    """Copy the project to one machine, make its environment with this machine's versions (`own`), and return them in
    words. Raise `UserError`.
    """
    if is_here(host):
        return "this machine; `make install` keeps its environment"
    send_code(host, files)
    tell(f"{host.name} | {len(files)} files of the project are there")
    again = "then type the same command again"
    words = ["sh", "-c", IN_FOLDER, "sh", host.folder, "sh", "-c", MAKE, "sh", venv_of(host), own.python]
    argv = arguments(host, words, tty=True)
    with start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        last = relay(host, process)
    if process.returncode == NO_PYTHON or "-m venv` failed" in last or "make: not found" in last:
        packages = f"sudo apt install make python{own.python} python{own.python}-venv"
        hint = f"all machines need this one's Python {own.python}: {login(host)}, {packages}; {again}"
        raise HardwareError(last, hint=hint)
    if process.returncode:
        hint = f"to see more: {login(host)}, cd {host.folder}, make install"
        raise HardwareError(f"`make install` ended with code {process.returncode}: {last}", hint=hint)
    facts = facts_of(host)
    if differences := other_versions(own, facts):
        reinstall = f"make install on this machine, too; remove `{venv_of(host)}` in `{host.folder}` there; {again}"
        text = f"other versions than here: {', '.join(differences.values())}"
        raise HardwareError(text, hint=versions_remedy(differences, reinstall))
    return f"Python {facts.versions['python']}, torch {facts.versions['torch']}"


# ---- Model and data


def place_there(path: Path, facts: Facts) -> str:
    """Map a local path to another machine: below its cache, hub cache, project or home, else the same path."""
    path = path.absolute()
    roots = (
        (cache_folder().absolute(), facts.cache),
        (hub_cache(), facts.hub),
        (Path.cwd(), facts.folder),
        (Path.home(), facts.home),
    )
    for here, there in roots:
        for root, tried in ((here, path), (here.resolve(), path.resolve())):
            if tried.is_relative_to(root):
                return str(Path(there) / tried.relative_to(root))
    return str(path)


def send_prepared(host: Host, facts: Facts, prepared: Prepared, folders: Iterable[Path]) -> Prepared:
    """Copy the model, other `folders` of the configuration and the prepared rows to `host`; return their paths
    there.
    """
    model = Path(prepared.model.path).absolute()
    adapter = prepared.adapter
    for folder in dict.fromkeys([model, *folders, *([Path(adapter.path)] if adapter else [])]):
        if folder.is_dir():
            send_model(host, facts, folder, place_there(folder, facts))
    splits = []
    for split in (prepared.train, prepared.validation):
        there = place_there(Path(split.path), facts) if split else ""
        if split:
            rows = Path(split.path)
            names = sorted(str(path.relative_to(rows)) for path in rows.rglob("*") if path.is_file())
            deliver(host, rows, there, names)  # the folder is named by a hash of its content
        splits.append(replace(split, path=there) if split else None)
    moved = replace(prepared.model, path=place_there(model, facts))
    adapter = adapter and replace(adapter, path=place_there(Path(adapter.path), facts))
    return Prepared(model=moved, train=splits[0], validation=splits[1], adapter=adapter)


def send_model(host: Host, facts: Facts, folder: Path, there: str) -> None:
    """Copy a model's folder, and the targets of its links if it is in the hub's cache."""
    hint = "it is another model: move it away there, or keep yours in a folder of another name here"
    hub = hub_cache()

    def send(source: Path, place: str, names: Sequence[str], *options: str) -> None:
        marker = f"{facts.cache}/cluster/brought-{text_sha256(facts.host_name + place)[:16]}"
        deliver(host, source, place, names, marker=marker, hint=hint, options=options)

    if not folder.is_relative_to(hub):
        require_plain(folder)
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and not _is_secret(path.name))
        return send(folder, there, names, "-L")
    repository = hub / folder.relative_to(hub).parts[0]
    above = Path(there).parents[len(folder.relative_to(repository).parts) - 1]
    root = repository.resolve()
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    files += [path.resolve() for path in files if path.is_symlink() and path.resolve().is_relative_to(root)]
    inside = {str(path.relative_to(root if path.is_relative_to(root) else repository)) for path in files}
    return send(root, str(above), sorted(inside))


# ---- Runs


def send_texts(host: Host, folder: str, texts: Mapping[str, str]) -> None:
    """Write small files that only their owner may read into a folder on `host`."""
    with TemporaryDirectory(prefix="sft-play-") as name:
        place = Path(folder if is_here(host) else name)
        place.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (place / file).touch(0o600)
            (place / file).write_text(text, encoding="utf-8")
        if not is_here(host):
            deliver(host, place, folder, list(texts))


def send_run(host: Host, facts: Facts, run_folder: RunFolder, checkpoint: Path | None) -> None:
    """Copy what `host` needs to continue a run from `checkpoint`."""
    names = [name for name in RUN_FILES if (run_folder.path / name).is_file()]
    if checkpoint is not None and checkpoint.is_dir():
        names.append(str(checkpoint.relative_to(run_folder.path)))
    options = ["-r", "--ignore-missing-args"]  # rotation may remove it during the transfer
    deliver(host, run_folder.path, f"{facts.runs}/{run_folder.name}", names, options=options)


def fetch(host: Host, there: str, here: Path, seconds: float) -> None:
    """Copy the plain files of a remote folder, which may be missing, to `here`."""
    here.mkdir(parents=True, exist_ok=True)
    rsync(host, ["--ignore-missing-args", "--no-links", "--no-D", remote(host, there), f"{here}/"], timeout=seconds)
