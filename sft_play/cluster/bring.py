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
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

import sft_play
from sft_play.cluster.check import Facts, ask_doctor, other_versions, versions_remedy
from sft_play.cluster.inventory import Host, inventory_for_call
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
from sft_play.runs.folder import RunFolder, cache_folder, hub_cache, require_plain
from sft_play.runs.prepared import Prepared
from sft_play.text import gib, list_some, plural, tell

SECONDS = 6 * 3600.0
"""Time limit of one transfer, which may be a large model over a slow network."""
VANISHED = 24
"""rsync's exit code when source files were removed during the transfer."""
WORTH_SAYING_BYTES = 2**28
MOST_NAMED = 10
MARKER = ".cache/sft-play-sent"
"""Marker in a machine's project folder, ignored by git."""
SET_ASIDE = ".cache/replaced"
SECRETS = (".env", ".netrc")
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""Files of a run, besides a checkpoint, that another machine needs to continue it."""
OPEN = (
    HOME + 'd=$(h "$1"); m=$(h "$2"); mkdir -p -- "$d" && cd -- "$d" || exit 1; if [ -e "$m" ]; then echo ours; elif'
    ' [ -z "$(ls -A)" ]; then echo empty; else echo foreign; fi'
)
"""Arguments: a folder and its marker. Prints whether the folder is ours, empty or foreign."""
WRITE = HOME + 'f=$(h "$1"); umask 077; mkdir -p -- "${f%/*}" && cat >"$f"'
"""Argument: a file; its content is on stdin."""


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
    state = ask(host, ["sh", "-c", OPEN, "sh", there, marker or "/"], f"`{there}` cannot be made").split()[-1]
    foreign = state == "foreign"
    words = ["--from0", "--files-from=-", *(["--checksum"] if foreign else []), *options]
    words += [f"{source}/", remote(host, f"{there}/")]
    size, replaced = changes(rsync(host, ["-n", "--out-format=%i %l %n", *words], names=names))
    if foreign and replaced:
        count = plural(len(replaced), "file")
        text = f"host `{host.name}`: `{there}` has {count} that this command did not bring, and others than here"
        raise UserError(f"{text}: {_listed(replaced)}", place=host.place, hint=hint)
    if marker and state != "ours":
        write_there(host, marker, "")
    if size > WORTH_SAYING_BYTES:
        tell(f"{host.name} | copying {gib(size)} to `{there}`")
    backup = ["--backup", f"--backup-dir={aside}"] if aside else []
    rsync(host, ["--partial", *backup, *words], names=names)
    if aside and replaced:
        tell(f"host `{host.name}`: {_listed(replaced)} replaced; the old files are in `{there}/{aside}`")


def write_there(host: Host, path: str, text: str) -> None:
    """Write a small file that only its owner may read."""
    ask(host, ["sh", "-c", WRITE, "sh", path], f"`{path}` cannot be written", text=text.encode())


def _listed(names: Sequence[str]) -> str:
    return list_some([f"`{name}`" for name in sorted(names)], MOST_NAMED)


# ---- rsync


def remote(host: Host, path: str) -> str:
    """Return a path on `host` as rsync takes it, without `~/`, where rsync starts anyway."""
    name = host.ssh or host.address
    return f"{f'[{name}]' if ':' in name else name}:{path.removeprefix('~/')}"


def rsync(host: Host, words: Sequence[str], *, names: Iterable[str] = (), timeout: float = SECONDS) -> bytes:
    """Run rsync and return its output; `names` is its list of files, where `#` and `;` would begin a comment.

    Raise `HardwareError` with rsync's message.
    """
    shell = shlex.join(arguments(host, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "-s", "--timeout=60", "-e", shell, *words]
    # On Linux a name need not be UTF-8.
    text = b"".join(os.fsencode(f"./{name}" if name[0] in "#;" else name) + b"\0" for name in names)
    code, out, err = run(argv, text or None, timeout)
    require_done(host, 0 if code == VANISHED else code, err, "rsync failed")
    return out


def changes(out: bytes) -> tuple[int, list[str]]:
    """Return the bytes and the replaced files of a dry run with `--out-format=%i %l %n`, without folders and changes of
    time or mode only.
    """
    rows = re.findall(r"^[<>c][fL](\S{9,}) (\d+) (.+)$", out.decode(errors="replace"), re.MULTILINE)
    return sum(int(size) for _, size, _ in rows), [name for kind, _, name in rows if not kind.startswith("+++")]


# ---- Code


def project() -> Path:
    """Return the folder of the project that this process runs from."""
    return Path(sft_play.__file__).resolve().parent.parent


def code_files() -> list[str]:
    """Return the existing files that git tracks, relative to the project's folder, without `.env`.

    Print which files of the package are not tracked, and so not sent. Raise `UserError` if the folder is not a git
    checkout or tracks nothing.
    """
    names = [name for name in _git_files("--cached") if not _is_secret(name)]
    if new := [name for name in _git_files("--others", "--exclude-standard") if name.startswith("sft_play/")]:
        tell(f"note: not sent, because git does not track it: {_listed(new)}; `git add` sends them")
    return [name for name in names if os.path.lexists(project() / name)]


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
    """Update the project on `host`; what is replaced, or gone here from the package, moves aside. Raises as
    `deliver`.
    """
    hint = "another `folder` in the inventory; or commit and move them away there, and type the same command again"
    aside = f"{SET_ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}"
    deliver(host, project(), host.folder, files, marker=f"{host.folder}/{MARKER}", hint=hint, aside=aside)
    removal = [
        "-r",
        "--out-format=%i %n",
        "--delete",
        "--exclude=__pycache__",
        "--existing",
        "--ignore-existing",
        "--backup",
        f"--backup-dir=../{aside}/sft_play",
    ]
    out = rsync(host, [*removal, f"{project()}/sft_play/", remote(host, f"{host.folder}/sft_play/")])
    if gone := re.findall(r"^\*deleting +(.*[^/\n])$", out.decode(errors="replace"), re.MULTILINE):
        names = _listed([f"sft_play/{name}" for name in gone])
        tell(f"host `{host.name}`: {names} not here; moved to `{host.folder}/{aside}`")


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
exit 1
"""
)
"""Takes the environment's folder and this machine's Python version."""


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
    words = ["sh", "-c", IN_FOLDER, "sh", host.folder, "sh", "-c", MAKE, "sh", venv_of(host), own.python]
    argv = arguments(host, words, tty=True)
    with start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        last = relay(host, process)
    if process.returncode:
        packages = f"sudo apt install make python{own.python} python{own.python}-venv"
        hint = f"{login(host)}, {packages}; to see more: cd {host.folder}, make install"
        raise HardwareError(f"`make install` ended with code {process.returncode}: {last}", hint=hint)
    facts = facts_of(host)
    if differences := other_versions(own, facts):
        again = f"make install on this machine, too; remove `{venv_of(host)}` in `{host.folder}` there; repeat"
        text = f"other versions than here: {', '.join(differences.values())}"
        raise HardwareError(text, hint=versions_remedy(differences, again))
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
    models = [Path(part.path).absolute() for part in (prepared.model, prepared.adapter) if part]
    for folder in dict.fromkeys([*models, *folders]):
        if folder.is_dir():
            send_model(host, facts, folder, place_there(folder, facts))
    for rows in [Path(split.path) for split in (prepared.train, prepared.validation) if split]:
        names = sorted(str(path.relative_to(rows)) for path in rows.rglob("*") if path.is_file())
        deliver(host, rows, place_there(rows, facts), names)  # the folder is named by a hash of its content
    parts = {item.name: getattr(prepared, item.name) for item in fields(prepared)}
    there = {name: replace(part, path=place_there(Path(part.path), facts)) for name, part in parts.items() if part}
    return replace(prepared, **there)


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
