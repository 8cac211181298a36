"""Bring code, environment, model, prepared data and checkpoints to the machines of a cluster: only what a machine
lacks, by rsync over SSH.

Of the code goes what git tracks, as it is in the working tree. A folder that we fill there bears a marker: in one
without it no file that differs is ever replaced, in one with it rsync sets aside what it replaces. Needs rsync and a
shell there, no Python: the first call comes before there is an environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import sft_play
from sft_play.cluster.findings import minor, other_versions, versions_remedy
from sft_play.cluster.hosts import (
    HOME,
    SSH_FAILED,
    TIMED_OUT,
    arguments,
    ask,
    facts_of,
    in_folder,
    is_here,
    last_word,
    login,
    mark_in,
    on_all,
    print_line,
    require_master_here,
    run,
    start,
    trouble,
)
from sft_play.cluster.inventory import Host, inventory_for_call, plain_path
from sft_play.cluster.remote import Facts, hub_folder
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError, printable
from sft_play.files import text_sha256
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder, cache_folder, require_plain, runs_folder
from sft_play.runs.origin import OPTIONAL
from sft_play.runs.prepared import Prepared
from sft_play.text import bar, plural

if TYPE_CHECKING:
    from sft_play.config.schema import Config

SECONDS = 6 * 3600.0
"""The longest time of one transfer: a large model over a slow network."""
VANISHED = 24
"""rsync's exit code where files of the source were removed meanwhile."""
MOST_NAMED = 10
GIB = 2**30
MARKER = ".cache/sft-play-sent"
"""In the project's folder of a machine, where git ignores it: the names of the files that were brought, each with a NUL
behind it.
"""
SET_ASIDE = ".cache/replaced"
SECRETS = (".env", ".netrc")
NOTICED = ("sft_play/", "configs/")
"""Where a file that is not tracked yet was probably meant to be sent."""
INVENTORIES = "configs/clusters/"
"""Read on the master only: one of your own stays there, and needs no commit."""
RUN_FILES = ("config.json", "plan.json", "events.jsonl", "stamp.json", "deepspeed.json")
"""What another machine needs of a run to continue it, apart from a checkpoint."""
OPEN = (
    HOME
    + 'd=$(h "$1"); m=$(h "$2"); mkdir -p -- "$d" && cd -- "$d" || exit 1; echo; df -Pk . | tail -n 1; if [ -e "$3" ];'
    ' then echo same; elif [ -e "$m" ]; then echo ours; elif [ -z "$(ls -A)" ]; then echo empty; else echo'
    " foreign; fi"
)
"""Takes a folder, its marker, and a file that stands in the folder where it is the one of the machine that asks."""
MARK = HOME + 'm=$(h "$1"); mkdir -p -- "${m%/*}" && : >>"$m"'
TIDY = (
    HOME
    + 'd=$(h "$1"); cd -- "$d" || exit 1; cat >"$2.now" || exit 1; mkdir -p -- "$3" || exit 1; export LC_ALL=C; comm -z'
    ' -13 <(sort -z "$2.now") <(sort -z "$2") | while IFS= read -r -d "" f; do case "/$f/" in */../*|//*) ;; *) [ -f'
    ' "./$f" ] && mkdir -p -- "$(dirname -- "$3/$f")" && mv -- "./$f" "$3/$f";; esac; done; mv -f -- "$2.now" "$2";'
    ' rmdir -- "$3" 2>/dev/null; :'
)
"""Takes the project's folder, its marker, and where files that have left the project are set aside; reads the names of
the project's files.
"""


def deliver(
    host: Host,
    source: Path,
    there: str,
    names: Sequence[str],
    *,
    marker: str = "",
    hint: str = "",
    seen: str = "",
    aside: str = "",
    options: Sequence[str] = (),
) -> bool:
    """Bring files of `source` (`names`, relative to it) to the folder `there` where they are missing or others there.

    With a `marker` (a path there) a folder that has none, and files of other content, is refused with their names and
    `hint`: `UserError`, and nothing is sent. What is replaced in a marked folder is set aside in `aside`, where that is
    given. `seen` names a file in `source` by which the folder is recognized as `source` itself: then nothing is done,
    and `False` returned. Raise `HardwareError` for a host that cannot be asked, or has no room.
    """
    if not names:
        return True
    lines = _ask(host, ["sh", "-c", OPEN, "sh", there, marker, seen or "/dev/null/none"], f"`{there}` cannot be made")
    disk, state = lines[-2:]
    if state == "same":
        return False
    foreign = bool(marker) and state == "foreign"
    words = [
        "--from0",
        "--files-from=-",
        *(["--checksum"] if foreign else []),
        *options,
        f"{source}/",
        remote(host, f"{there}/"),
    ]
    size, new, replaced = changes(rsync(host, ["-n", "--out-format=%i %l %n", *words], names=names))
    if foreign and replaced:
        text = (
            f"host `{host.name}`: `{there}` has {plural(len(replaced), 'file')} that this command did not bring, and"
            " others than here"
        )
        raise UserError(f"{text}: {_shown(replaced)}", place=host.place, hint=hint)
    room = re.search(r"(\d+)\s+\d+%\s", disk)  # of `df -P`: available, capacity, mount point
    free = int(room[1]) * 1024 if room else 2**62
    if size > free:
        text = f"{size / GIB:.2f} GiB are to be brought to `{there}`, and its disk has {free / GIB:.2f} GiB free"
        raise _failed(
            host, text, "make room there (RUNS_DIR, SFT_PLAY_CACHE and HF_HOME of that machine move its folders)"
        )
    if marker and state != "ours":
        _ask(host, ["sh", "-c", MARK, "sh", marker], f"`{marker}` cannot be written")
    if new or replaced or foreign:  # of the same content: times become ours, so that nothing is read again
        backup = ["--backup", f"--backup-dir={aside}"] if aside else []
        with bar(f"to {host.name}", "MiB") as show:

            def show_bytes(out: bytes) -> None:
                if numbers := re.findall(rb"([\d,.]+) +\d+% ", out[-500:]):  # bytes so far, of all files
                    show(int(re.sub(rb"\D", b"", numbers[-1])) >> 20, size >> 20)

            rsync(host, ["--partial", "--info=progress2", *backup, *words], names=names, heard=show_bytes)
    if aside and replaced:
        print_line(f"host `{host.name}`: {_shown(replaced)} replaced; the old files are in `{there}/{aside}`")
    return True


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"`{name}`" for name in sorted(names)[:MOST_NAMED]) + more


def _failed(host: Host, text: str, hint: str | None) -> HardwareError:
    return HardwareError(f"host `{host.name}`: {text}", place=host.place, hint=hint)


def _ask(host: Host, words: Sequence[str], what: str, text: bytes | None = None) -> list[str]:
    """Run a command on `host` and return the lines that it printed. Raise `HardwareError`, with `what` that means."""
    code, out, said = run(arguments(host, words), text, 60)
    _require_done(host, code, said, what)
    return out.decode(errors="replace").splitlines()


def _require_done(host: Host, code: int, said: str, what: str) -> None:
    if code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, code, said)
        raise _failed(host, why.text, why.remedy)
    if code:
        hint = "make room on its disk, and type the same command again" if "No space left" in said else None
        hint = "on it: sudo apt install rsync" if "rsync" in what and "not found" in said else hint
        raise _failed(host, f"{what}: {last_word(said) or f'exit code {code}'}", hint)


# ---- rsync


def remote(host: Host, path: str) -> str:
    """Return a path on `host` as rsync takes it, without `.`, `..` and double slashes; `~/` is where it starts
    anyway.
    """
    name, end = host.ssh or host.address, "/" if path.endswith("/") else ""
    plain = plain_path(path).removeprefix("~/")
    return f"{f'[{name}]' if ':' in name else name}:{plain if plain == '/' else plain + end}"


def rsync(
    host: Host,
    words: Sequence[str],
    *,
    names: Iterable[str] = (),
    timeout: float = SECONDS,
    heard: Callable[[bytes], object] | None = None,
) -> bytes:
    """Run rsync and return what it prints; `names` are its list of files, in which `#` and `;` begin a comment.
    `heard`: see `run`.

    Raise `HardwareError` with what it says.
    """
    shell = shlex.join(arguments(host, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "-s", "--timeout=60", "-e", shell, *words]
    text = join_names(f"./{name}" if name[0] in "#;" else name for name in names)
    try:
        code, out, said = run(argv, text or None, timeout, heard=heard)
    except FileNotFoundError:
        raise HardwareError("there is no `rsync` on this machine", hint="apt install rsync") from None
    _require_done(host, 0 if code == VANISHED else code, said, "rsync failed")
    return out


def changes(out: bytes) -> tuple[int, list[str], list[str]]:
    """Return the bytes, the new files and the replaced ones of a dry run with `--out-format=%i %l %n`; not folders,
    times and modes alone.
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
    """Return names of files as rsync reads them; on Linux a name need not be UTF-8."""
    return b"".join(os.fsencode(name) + b"\0" for name in names)


# ---- Code


def project() -> Path:
    """Return the folder of this project: what is trained with."""
    return Path(sft_play.__file__).resolve().parent.parent


def code_files(*, report: bool = False) -> list[str]:
    """Return the project's files that git tracks and that are there, relative to its folder; no `.env`, and none of the
    folder of runs.

    With `report` the user is told which files stay behind since they are not tracked, inventories excepted. Raise
    `UserError` where it is no git checkout, or one in which nothing was added.
    """
    place, runs = project(), runs_folder().absolute()
    names = [
        name
        for name in _git_files("--cached")
        if not _is_secret(name)
        and not (place / name).is_relative_to(runs)
        and ((place / name).is_file() or (place / name).is_symlink())
    ]
    new = _git_files("--others", "--exclude-standard") if report else []
    if behind := [name for name in new if name.startswith(NOTICED) and not name.startswith(INVENTORIES)]:
        print_line(f"note: git does not track yet, and so does not send: {_shown(behind)}; git add sends them")
    return names


def _is_secret(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last in SECRETS or (last.startswith(".env.") and not last.endswith((".example", ".sample", ".template")))


def _git_files(*options: str) -> list[str]:
    """Return what `git ls-files` lists in the project; a name that is not UTF-8 as the system gives it to Python."""
    place = project()
    try:
        code, out, said = run(["git", "-C", str(place), "ls-files", "-z", *options], None, 60)
    except FileNotFoundError as error:
        raise HardwareError("there is no `git` on this machine", hint="apt install git") from error
    if code or not (out or "--cached" not in options):
        raise UserError(
            f"the other machines get the files that git tracks in `{place}`, and it tracks none:"
            f" {last_word(said) or 'nothing was added'}",
            hint=(
                "git clone the project, `make install` in the clone, and type the command there; in a folder of your"
                " own: git add, git commit"
            ),
        )
    return sorted({os.fsdecode(name) for name in out.split(b"\0") if name})


def send_code(host: Host, files: Sequence[str]) -> None:
    """Make the project on `host` the same as here; what is replaced or has left the project is set aside. Raise as
    `deliver`.
    """
    hint = "another `folder` in the inventory; or commit and move them away there, and type the same command again"
    aside, marker = f"{SET_ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}", f"{host.folder}/{MARKER}"
    with mark_in(project() / ".cache") as name:
        another = deliver(
            host, project(), host.folder, files, marker=marker, hint=hint, aside=aside, seen=f".cache/{name}"
        )
    if another:
        words = ["bash", "-c", TIDY, "bash", host.folder, MARKER, aside]
        _ask(host, words, f"`{host.folder}` cannot be tidied", join_names(files))


# ---- Environment

NO_PYTHON = 97
"""Exit code of `INSTALL` where the host has not this machine's Python."""
INSTALL = f"""{HOME}
v=$(h "$2")
if [ "$3" = keep ] && [ -x "$v/bin/python" ] && [ "$v/.runtime" -nt constraints.txt ] && [ "$v/.runtime" -nt pyproject.toml ]; then
  echo "the environment in $v is up to date"; exit 0
fi
for p in "python$1" "$v/bin/python" python3; do
  if [ "$("$p" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
    exec bash scripts/install.sh "$p" "$v" runtime
  fi
done
echo "error: there is no Python $1, which the first host has; python3 is $(python3 --version 2>&1)"
exit 97
"""
"""Takes this machine's Python version (`3.11`), the environment's folder, and `keep` where one that is newer than the
pins stays.

Runs in the project's folder.
"""
AGAIN = "then type the same command again"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What pip writes to a terminal apart from letters."""


def install_all(call: Call) -> int:
    """`make cluster-install`: the project and its environment on all machines at once; return 0 when all are ready,
    else 3.

    The same command continues where it stopped: files that are there are not sent again, and an environment that is
    newer than the pinned versions is left as it is.
    """
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    files = code_files(report=True)
    for host in inventory.hosts:
        venv_of(host)  # what cannot be installed into is reported before anything is sent
    own = facts_of(inventory.master)
    found = on_all(inventory.hosts, lambda host: install(host, files, own))
    failed = [name for name, one in found.items() if isinstance(one, UserError)]
    if call.json:
        rows = {
            name: (one.message, one.hint) if isinstance(one, UserError) else (one, None) for name, one in found.items()
        }
        print(
            json.dumps(
                [{"host": n, "ok": n not in failed, "detail": text, "hint": hint} for n, (text, hint) in rows.items()]
            )
        )
        return HardwareError.exit_code if failed else 0
    for name, one in found.items():
        if isinstance(one, UserError):
            print(
                f"failed  {name}: {one.message}" + (f"\n        hint: {one.hint}" if one.hint else ""), file=sys.stderr
            )
        else:
            print(f"ready  {name}: {one}")
    if failed:
        hint = "fix the error above and repeat the command: finished work is kept"
        print(
            f"\nerror: {', '.join(f'`{name}`' for name in failed)} cannot be used yet\n\nhint: {hint}", file=sys.stderr
        )
    return HardwareError.exit_code if failed else 0


def venv_of(host: Host) -> str:
    """Return the environment's folder, from its interpreter. Raise `UserError` for one that is in no environment."""
    python = PurePosixPath(host.python)
    if python.parent.name != "bin" or not python.name.startswith("python") or len(python.parts) < 3:
        raise UserError(
            f"host `{host.name}`: `python` is `{host.python}`, which is no environment's interpreter",
            place=host.place,
            hint="`.venv/bin/python` is made in its `folder`; an environment of your own is yours to fill",
        )
    return str(python.parent.parent)


def install(host: Host, files: Sequence[str], own: Facts) -> str:
    """Bring the project to one machine and make its environment, with the versions of this one (`own`); return what it
    has then.

    The machine's output is shown with its name before each line. Raise `UserError`.
    """
    if is_here(host):
        return "this machine; `make install` keeps its environment"
    send_code(host, files)
    print_line(f"{host.name} | {len(files)} files of the project are there")
    for mode in ("keep", "renew"):
        words = in_folder(host, ["sh", "-c", INSTALL, "sh", minor(own), venv_of(host), mode])
        last, code = _run(host, arguments(host, words, tty=True))  # with a terminal it ends when this command does
        if code:
            raise not_installed(host, own, last, code)
        found = facts_of(host)
        apart = other_versions(own, found)
        if not set(apart) - set(OPTIONAL) or "Python" in apart:
            break
        if mode == "keep":
            print_line(
                f"{host.name} | its versions are others: {', '.join(apart.values())}; installing the pinned ones"
            )
    if not apart:
        return f"Python {found.python}, torch {found.packages['torch']}"
    remedy = versions_remedy(apart, "make install on this machine, too: both get the pinned versions")
    if "Python" in apart:
        remedy = f"{_python_hint(host, own)}, and remove `{venv_of(host)}` in `{host.folder}` there"
    raise HardwareError(f"other versions than here: {', '.join(apart.values())}", hint=f"{remedy}; {AGAIN}")


def not_installed(host: Host, own: Facts, last: str, code: int) -> HardwareError:
    """Return why `INSTALL` ended with `code`, by its last words, and what to do."""
    text = last if code == NO_PYTHON else f"scripts/install.sh ended with code {code}: {last}"
    if code == NO_PYTHON or "-m venv` failed" in last:
        return HardwareError(text, hint=f"{_python_hint(host, own)}; {AGAIN}")
    return HardwareError(text, hint=f"to see more: {login(host)}, cd {host.folder}, make install")


def _python_hint(host: Host, own: Facts) -> str:
    version = minor(own)
    packages = f"sudo apt install python{version} python{version}-venv"
    return f"all machines need this one's Python {version}: {login(host)}, {packages}"


def _run(host: Host, argv: Sequence[str]) -> tuple[str, int]:
    """Run a command, its output line by line here; return the first line that is an error, else the last, and the exit
    code.
    """
    last = ""
    with start(argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for raw in iter(process.stdout.readline, b""):
            line = COLOURS.sub("", raw.decode("utf-8", "replace")).rstrip()
            if line:
                last = last if last.lower().startswith("error") else line
                print_line(f"{host.name} | {printable(line)}")
    return re.sub(r"^error: ", "", last, flags=re.IGNORECASE), process.returncode


# ---- Model and data


def place_there(path: Path, facts: Facts) -> str:
    """Return where `path` of this machine is on another: in the same place of its cache, hub cache, project or home,
    else at the same path.
    """
    path = path.absolute()
    roots = (
        (cache_folder().absolute(), facts.cache),
        (hub_folder(), facts.hub),
        (Path.cwd(), facts.folder),
        (Path.home(), facts.home),
    )
    for here, there in roots:
        for root, tried in ((here, path), (here.resolve(), path.resolve())):
            if tried.is_relative_to(root):
                return str(Path(there) / tried.relative_to(root))
    return str(path)


def send_prepared(host: Host, facts: Facts, config: Config, prepared: Prepared) -> Prepared:
    """Bring model and prepared rows to `host`; return where they are there."""
    model = Path(prepared.model.path).absolute()
    folders = [
        model,
        *(Path(name).expanduser().absolute() for name in (config.model.name, config.model.tokenizer) if name),
    ]
    if not (facts.shares_cache and model.is_relative_to(cache_folder().absolute())):
        for folder in dict.fromkeys(folders):
            if folder.is_dir():
                send_model(host, facts, folder, place_there(folder, facts))
    splits = []
    for split in (prepared.train, prepared.validation):
        there = place_there(Path(split.path), facts) if split else ""
        if split and not facts.shares_cache:
            rows = Path(split.path)
            names = sorted(str(path.relative_to(rows)) for path in rows.rglob("*") if path.is_file())
            deliver(host, rows, there, names)  # its name is made of its content
        splits.append(replace(split, path=there) if split else None)
    moved = replace(prepared.model, path=place_there(model, facts))
    return Prepared(model=moved, train=splits[0], validation=splits[1])


def send_model(host: Host, facts: Facts, folder: Path, there: str) -> None:
    """Bring a model's folder; of one in the hub's cache also what its links point to."""
    hint = "it is another model: move it away there, or keep yours in a folder of another name here"
    hub = hub_folder()

    def send(source: Path, place: str, names: Sequence[str], *options: str) -> None:
        marker = f"{facts.cache}/cluster/brought-{text_sha256(facts.host_name + place)[:16]}"
        deliver(host, source, place, names, marker=marker, hint=hint, options=options)

    if not folder.is_relative_to(hub):
        require_plain(folder)
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and not _is_secret(path.name))
        return send(folder, there, names, "-L")
    repository = hub / folder.relative_to(hub).parts[0]
    above = Path(there).parents[len(folder.relative_to(repository).parts) - 1]
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    files += [
        path.resolve() for path in files if path.is_symlink() and path.resolve().is_relative_to(repository.resolve())
    ]
    root = repository.resolve()
    inside = {str(path.relative_to(root if path.is_relative_to(root) else repository)) for path in files}
    return send(root, str(above), sorted(inside))


# ---- Runs


def send_run(host: Host, facts: Facts, run: RunFolder, checkpoint: Path | None) -> None:
    """Bring what `host` needs to continue a run from `checkpoint`. Set newer checkpoints there aside."""
    if facts.shares_runs:
        return
    there = f"{facts.runs}/{run.name}"
    names = [name for name in RUN_FILES if (run.path / name).is_file()]
    if checkpoint is not None and checkpoint.is_dir():
        names.append(str(checkpoint.relative_to(run.path)))
    deliver(host, run.path, there, names, options=["-r", "--ignore-missing-args"])  # it may be rotated away meanwhile
    ask(host, "one_checkpoint", timeout=60, run=run.name, step=step_of(checkpoint) if checkpoint else -1)


def fetch(host: Host, there: str, here: Path, seconds: float) -> None:
    """Bring the plain files of a folder there, which may be missing, to `here`."""
    here.mkdir(parents=True, exist_ok=True)
    try:
        rsync(host, ["--ignore-missing-args", "--no-links", "--no-D", remote(host, there), f"{here}/"], timeout=seconds)
    finally:
        if not any(here.iterdir()):
            here.rmdir()
