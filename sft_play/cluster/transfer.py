"""rsync to a machine and from it, and what must not be lost by that: a file that stands there, is another one, and was not brought by us.

What is brought is listed there with its digests (`Listing`), so that the next call knows its own files from a person's. The list is written
before the files: a transfer that is cut off leaves none that nobody knows. What stands there already as it is here is not sent, and listed as
seen: it may be replaced later, but was never ours to remove. Needs rsync and a machine's own tools, no Python: the first call comes before
there is an environment.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.cluster.children import waited_for
from sft_play.cluster.ssh import SSH_FAILED, TIMED_OUT, arguments, no_client, run_on, trouble
from sft_play.config.cluster import Host, Inventory
from sft_play.errors import HardwareError, UserError
from sft_play.files import file_sha256

SECONDS = 6 * 3600.0
"""The longest time of one transfer: a large model over a slow network."""
LOOK_SECONDS = 1800.0
"""The longest time of hashing files that stand there already."""
MOST_NAMED = 10
GIB = 2**30
HOME = 'h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }; '
MAKE_FOLDER = HOME + 'mkdir -p -- "$(h "$1")"'
MARK = b"\0sft-play there\0"
LOOK = HOME + (
    'l=$(h "$2"); cd -- "$(h "$1")" || exit 1; printf "\\000sft-play there\\000"; df -Pk . ; printf "\\000\\000"; '
    'if [ -n "$l" ] && [ -f "$l" ]; then cat -- "$l"; fi; printf "\\000\\000"; LC_ALL=C xargs -0 -r sha256sum -z --; c=$?; [ $c = 123 ] || exit $c'
)
"""Takes a folder and its list; standard input names files in it. Prints `df`, the list, the digests of those files that are there."""
TOUCH = HOME + (
    'cd -- "$(h "$1")" || exit 1; xargs -0 -r -n 32 sh -c '
    '\'while [ $# -gt 1 ]; do touch -c -m -d "@$1" -- "$2" 2>/dev/null; shift 2; done\' sh'
)
"""Takes a folder; standard input gives seconds since 1970 and a name in it, in turn. 32: as many of the longest names as fit one command."""
KEEP = HOME + 'l=$(h "$1"); mkdir -p -- "${l%/*}" && n=$(mktemp -- "$l.XXXXXX") && cat >"$n" && mv -f -- "$n" "$l"'
ABSENT = ": No such file or directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A file that rsync would send."""

    name: str
    size: int
    """Bytes."""
    new: bool
    """Nothing stands at its place there."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What was brought into a folder of a machine."""

    path: str
    """There: absolute, or `~/...`."""
    hint: str
    """What to do about files that would be lost."""
    missing: str = ""
    """What else where there is no list."""


Entry = tuple[str, str]
"""sha256 and name of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What stands in a folder of a machine."""

    free: int
    """Bytes that its disk has left."""
    brought: set[Entry]
    """What the list says that we sent."""
    seen: set[Entry]
    """What the list says that stood there as it was here, and was never sent."""
    found: Mapping[str, str]
    """Name -> sha256 of the files that are there, of those that were asked for."""


def make_folder(host: Host, inventory: Inventory, folder: str) -> None:
    """Makes a folder on `host`, with those above it. Raises `HardwareError`."""
    done = run_on(host, inventory, ["sh", "-c", MAKE_FOLDER, "sh", folder], timeout=30)
    _require(host, inventory, done.code, done.stderr, f"`{folder}` cannot be made")


def deliver(
    host: Host, inventory: Inventory, source: Path, there: str, names: Sequence[str], listing: Listing | None, *, options: Sequence[str] = (),
    spared: Sequence[str] = (),
) -> None:  # fmt: skip
    """Brings files of `source` (`names`, relative to it) into the folder `there` where they are missing or others there.

    With a `listing` a file that stands there, has another content and was not brought by us is never replaced: `UserError` with their
    names, and nothing is sent; those whose names begin with one of `spared` stay as they are instead. Raises `HardwareError` for a host
    that cannot be asked, or has no room. A file that is the same there gets this one's time, and is not sent.
    """
    if not names:
        return
    make_folder(host, inventory, there)
    words = ["--from0", "--files-from=-", *options, f"{source}/", remote(host, f"{there}/")]
    told = rsync(host, inventory, ["-n", "--out-format=%i %l %n", *words], names=names)
    if not told.strip():
        return
    changes = _changes(told)
    files = set(names)  # without the contents of folders, which rsync finds itself
    asked = [change.name for change in changes if not change.new and change.name in files]
    now = look(host, inventory, there, listing.path if listing else "", asked)
    times = _times(source, asked)
    ours, links = digests(source, asked), {name for name in files if "-L" not in options and (source / name).is_symlink()}
    left: set[str] = set()
    if listing is not None:
        foreign = foreign_files(ours, now.found, now.brought | now.seen)
        left = {name for name in foreign if name.startswith(tuple(spared))} if spared else set()
        _refuse(host, there, sorted(foreign - left), _hint(listing, now))
    equal = {name for name, digest in ours.items() if now.found.get(name) == digest} - links
    sent = [change for change in changes if change.name not in left | equal]
    _require_room(host, there, sum(change.size for change in sent), now.free)
    if listing is not None:
        new = digests(source, [change.name for change in sent if change.new and change.name not in links])
        known = {(digest, name) for name, digest in (ours | new).items() if name not in left}
        as_here = {(digest, name) for digest, name in known if name in equal}
        keep_list(host, inventory, listing.path, now.brought | known - as_here, now.seen | as_here - now.brought)
    if remaining := [name for name in names if name not in left | equal]:
        rsync(host, inventory, words, names=remaining)
    touch(host, inventory, there, {name: times[name] for name in equal if name in times})


def _hint(listing: Listing, now: Standing) -> str:
    return listing.hint if now.brought or now.seen or not listing.missing else f"{listing.hint}; {listing.missing}"


def _require_room(host: Host, there: str, size: int, free: int) -> None:
    if size > free:
        raise HardwareError(
            f"host `{host.name}`: {size / GIB:.2f} GiB are to be brought to `{there}`, and its disk has {free / GIB:.2f} GiB free",
            place=host.place or None, hint="make room there (RUNS_DIR, SFT_PLAY_CACHE and HF_HOME of that machine move its folders)",
        )  # fmt: skip


def _times(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns name -> nanoseconds since 1970 of the last change, of files that can be read. Read before the digests: a file that is changed in
    between has another time then, and is sent the next time."""
    times = {}
    for name in names:
        with contextlib.suppress(OSError):
            times[name] = (folder / name).stat().st_mtime_ns
    return times


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns name -> sha256 of the files of a folder that can be read; a link's is that of the file it leads to."""
    return {name: file_sha256(folder / name) for name in names if (folder / name).is_file()}


def foreign_files(ours: Mapping[str, str], found: Mapping[str, str], brought: set[tuple[str, str]]) -> set[str]:
    """Returns the names of files that stand there (`found`: name -> sha256), are not as ours, and are none that was brought."""
    return {name for name, digest in found.items() if digest != ours.get(name) and (digest, name) not in brought}


def _refuse(host: Host, there: str, names: Sequence[str], hint: str) -> None:
    if not names:
        return
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    what = "a file is another one than here and was" if len(names) == 1 else f"{len(names)} files are others than here and were"
    raise UserError(
        f"host `{host.name}`: in `{there}` {what} not brought by this command: {shown}{more}", place=host.place or None, hint=hint
    )


# ---- What stands there


def look(host: Host, inventory: Inventory, folder: str, listing: str, names: Sequence[str]) -> Standing:
    """Returns what stands in a folder, of `names`, and what its list says. Raises `HardwareError`."""
    what = f"`{folder}` cannot be looked at"
    out, said = _ask(host, inventory, ["sh", "-c", LOOK, "sh", folder, listing], joined(names), LOOK_SECONDS, what)
    wrong = next((line for line in said.splitlines() if line.startswith("sha256sum:") and not line.endswith(ABSENT)), None)
    _, mark, told = out.partition(MARK)
    if wrong or not mark:
        raise HardwareError(f"host `{host.name}`: {what}: {wrong or 'its shell said nothing'}", place=host.place or None)
    disk, _, rest = told.partition(b"\0\0")
    listed, _, hashed = rest.partition(b"\0\0")
    room = re.search(rb"(\d+)\s+\d+%\s", disk)  # of `df -P`: available, capacity, mount point
    free = int(room[1]) * 1024 if room else 2**62
    found = {name: digest for digest, name in entries(hashed)}
    return Standing(free=free, brought=set(entries(listed)), seen=set(entries(listed, b"*")), found=found)


def entries(text: bytes, kind: bytes = b" ") -> Iterable[Entry]:
    """Yields (sha256, name) of what `sha256sum -z` writes, and a list holds: what was brought, or with `*` what was seen."""
    for entry in text.split(b"\0"):
        digest, mark, name = entry[:64], entry[64:66], entry[66:]
        if re.fullmatch(rb"[0-9a-f]{64}", digest) and mark == b" " + kind and name:
            yield digest.decode(), os.fsdecode(name)


def keep_list(host: Host, inventory: Inventory, path: str, brought: Iterable[Entry], seen: Iterable[Entry] = ()) -> None:
    """Writes the list of what was brought and seen. Raises `HardwareError`."""
    lines = [(digest, b"  ", name) for digest, name in brought] + [(digest, b" *", name) for digest, name in seen]
    text = b"".join(digest.encode() + mark + os.fsencode(name) + b"\0" for digest, mark, name in sorted(lines))
    _ask(host, inventory, ["sh", "-c", KEEP, "sh", path], text, 60, f"`{path}` cannot be written")


def touch(host: Host, inventory: Inventory, folder: str, times: Mapping[str, int]) -> None:
    """Sets the last change of files in a folder (name -> nanoseconds since 1970), so that rsync need not compare them again; of those that are
    another user's it stays. Raises `HardwareError`."""
    pairs = [text for name, time in sorted(times.items()) for text in (f"{time // 10**9}.{time % 10**9:09}", name)]
    if pairs:
        _ask(
            host, inventory, ["sh", "-c", TOUCH, "sh", folder], joined(pairs), 600, f"times of files in `{folder}` cannot be set"
        )


def _ask(host: Host, inventory: Inventory, words: Sequence[str], text: bytes, seconds: float, what: str) -> tuple[bytes, str]:
    """Runs a command on `host` and returns what it said. Raises `HardwareError`, with `what` that means."""
    try:
        code, out, said = _run(arguments(host, inventory, words), text, seconds)
    except subprocess.TimeoutExpired:
        code, out, said = TIMED_OUT, b"", f"no answer within {seconds:g} s"
    _require(host, inventory, code, said, what)
    return out, said


def _require(host: Host, inventory: Inventory, code: int, said: str, what: str) -> None:
    """Raises `HardwareError` for a command that failed on `host`."""
    if code in (SSH_FAILED, TIMED_OUT):
        why = trouble(host, inventory, said)
        raise HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)
    if code:
        raise HardwareError(
            f"host `{host.name}`: {what}: {last_line(said) or f'exit code {code}'}", place=host.place or None, hint=_room(said)
        )


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
) -> bytes:  # fmt: skip
    """Runs rsync and returns what it prints; `names` are its list of files, in which `#` and `;` begin a comment. Raises `HardwareError` with what it
    says."""
    shell = shlex.join(arguments(host, inventory, [])[:-3])
    argv = ["rsync", "-a", "--no-owner", "--no-group", "-s", "--timeout=60", "-e", shell, *words]
    try:
        code, out, said = _run(
            argv, joined(f"./{name}" if name[0] in "#;" else name for name in names) if names else None, timeout
        )
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"host `{host.name}`: rsync took longer than {timeout:.0f} s", place=host.place or None) from error
    if code == SSH_FAILED:
        why = trouble(host, inventory, said)
        raise HardwareError(f"host `{host.name}`: {why.text}", place=host.place or None, hint=why.remedy)
    if code:
        hint = "on it: sudo apt install rsync" if "not found" in said else _room(said)
        line = last_line(said) or f"exit code {code}"
        raise HardwareError(f"host `{host.name}`: rsync failed: {line}", place=host.place or None, hint=hint)
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
    """Returns names of files as rsync and xargs read them; on Linux a name need not be UTF-8."""
    return b"\0".join(os.fsencode(name) for name in names)


def _run(argv: Sequence[str], text: bytes | None, timeout: float) -> tuple[int, bytes, str]:
    """Runs a program to its end; returns its code and what it said. Raises `subprocess.TimeoutExpired`, `HardwareError` where it is missing."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError as error:
        if error.filename == "rsync":
            raise HardwareError("there is no `rsync` on this machine", hint="apt install rsync") from error
        raise no_client() from error
    with process, waited_for(process):
        try:
            out, said = process.communicate(text, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, said.decode(errors="replace")
