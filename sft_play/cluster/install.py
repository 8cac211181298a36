"""`make cluster-install`: the project and its environment on every machine of an inventory, by the project's own `scripts/install.sh` there.

The same command goes on where it stopped: files that are there are not sent again, and an environment that is newer than the pinned versions is
left as it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from sft_play.cluster.bring import code_files, send_code
from sft_play.cluster.hosts import (
    Facts,
    facts_of,
    only_optional_apart,
    require_master_here,
    versions_apart,
    versions_hint,
)
from sft_play.cluster.ssh import arguments, in_folder, is_here, on_all, waited_for
from sft_play.config.call import Call
from sft_play.config.cluster import Host, Inventory, inventory_for_call
from sft_play.errors import HardwareError, UserError, printable

NO_PYTHON = 97
"""Exit code of `INSTALL` where the host has not this machine's Python."""
INSTALL = """
h() { case "$1" in "~/"*) printf "%s" "$HOME/${1#"~/"}";; *) printf "%s" "$1";; esac; }
v=$(h "$2")
if [ "$3" = kept ] && [ -x "$v/bin/python" ] && [ "$v/.runtime" -nt constraints.txt ] && [ "$v/.runtime" -nt pyproject.toml ]; then
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
"""Takes this machine's Python version (`3.11`), the environment's folder, and `kept` where one that is newer than the pins stays.

Runs in the project's folder."""
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What pip writes to a terminal beside letters."""
_printing = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """How it went on one machine."""

    host: str
    ok: bool
    detail: str
    """Versions, or what failed."""
    hint: str | None = None


def main(call: Call) -> int:
    """Installs on all machines at once; returns 0 when all are ready, else 3."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    files = code_files(lambda line: print(line, file=sys.stderr, flush=True))
    for host in inventory.hosts:
        venv_of(host)  # what cannot be installed into is told before anything is sent
    own = facts_of(inventory.master, inventory, 60, mark=".")
    found = list(on_all(inventory, lambda host: install(host, inventory, files, own)).values())
    failed = [one for one in found if not one.ok]
    if call.json:
        print(json.dumps([asdict(one) for one in found]))
    for one in found if not call.json else ():
        print(f"{'ready' if one.ok else 'failed'}  {one.host}: {one.detail}", file=sys.stdout if one.ok else sys.stderr)
        if one.hint:
            print(f"        hint: {one.hint}", file=sys.stderr)
    if failed:
        names = ", ".join(f"`{one.host}`" for one in failed)
        print(f"\nerror: {names} cannot be used yet\n\nhint: mend what is said above and type the same command again: what is ready is kept",
              file=sys.stderr)  # fmt: skip
    return HardwareError.exit_code if failed else 0


def venv_of(host: Host) -> str:
    """Returns the environment's folder, from its interpreter. Raises `UserError` for one that is in no environment."""
    python = PurePosixPath(host.python)
    if python.parent.name != "bin" or not python.name.startswith("python") or len(python.parts) < 3:
        raise UserError(
            f"host `{host.name}`: `python` is `{host.python}`, which is no environment's interpreter",
            place=host.place or None,
            hint="`.venv/bin/python` is made in its `folder`; an environment of your own is yours to fill",
        )
    return str(python.parent.parent)


def install(host: Host, inventory: Inventory, files: Sequence[str], own: Facts) -> Installed:
    """Brings the project to one machine and makes its environment, with the versions of this one (`own`); its output is shown with the host's
    name before each line."""
    if is_here(host):
        return Installed(host=host.name, ok=True, detail="this machine; `make install` keeps its environment")
    try:
        send_code(host, inventory, files)
        say(host, f"{len(files)} files of the project are there")
        for kept in ("kept", "anew"):
            last, code = _run(host, inventory, in_folder(host, ["sh", "-c", INSTALL, "sh", _minor(own), venv_of(host), kept]))
            if code:
                return not_installed(host, own, last, code)
            found = facts_of(host, inventory, 60, mark=".")
            apart = versions_apart(own, found)
            if not apart or _minor(found) != _minor(own) or only_optional_apart(own, found):
                break
            if kept == "kept":
                say(host, f"its versions are others: {', '.join(apart)}; installing the pinned ones")
    except UserError as error:
        return Installed(host=host.name, ok=False, detail=error.message, hint=error.hint)
    return judged(host, own, found)


def not_installed(host: Host, own: Facts, last: str, code: int) -> Installed:
    """Returns why `INSTALL` ended with `code`, by its last words, and what to do."""
    detail = last if code == NO_PYTHON else f"scripts/install.sh ended with code {code}: {last}"
    if code == NO_PYTHON or "-m venv` failed" in last:
        hint = f"{_python_hint(host, own)}; then type the same command again"
    else:
        hint = f"to see more: {_ssh(host)}, cd {host.folder}, make install"
    return Installed(host=host.name, ok=False, detail=detail, hint=hint)


def judged(host: Host, own: Facts, found: Facts) -> Installed:
    """Returns whether a machine with these facts can train with this one."""
    version = _minor(own)
    if not found.code:
        detail, hint = "the project cannot be imported by its Python", f"remove `{venv_of(host)}` in `{host.folder}` there"
    elif "torch" not in found.versions:
        detail, hint = "its environment has no torch", f"remove `{venv_of(host)}` in `{host.folder}` there"
    elif _minor(found) != version:
        detail = f"its environment has Python {found.python}, and this machine {own.python}"
        hint = f"{_python_hint(host, own)}, and remove `{venv_of(host)}` in `{host.folder}`"
    elif apart := versions_apart(own, found):
        detail = f"other versions than here: {', '.join(apart)}"
        hint = versions_hint(own, found, host, "make install on this machine, too: both get the pinned versions")
    else:
        return Installed(host=host.name, ok=True, detail=f"Python {found.python}, torch {found.versions['torch']}")
    return Installed(host=host.name, ok=False, detail=detail, hint=f"{hint}; then type the same command again")


def _python_hint(host: Host, own: Facts) -> str:
    version = _minor(own)
    return f"all machines need this one's Python {version}: {_ssh(host)}, sudo apt install python{version} python{version}-venv"


def _ssh(host: Host) -> str:
    """Returns how one logs in there."""
    return f"ssh {f'-p {host.port} ' if host.port else ''}{f'{host.user}@' if host.user else ''}{host.ssh or host.address}"


def _minor(facts: Facts) -> str:
    return ".".join(facts.python.split(".")[:2])


def say(host: Host, line: str) -> None:
    """Prints one line of a machine."""
    with _printing:
        print(f"{host.name} | {printable(line)}", file=sys.stderr, flush=True)


def _run(host: Host, inventory: Inventory, words: Sequence[str]) -> tuple[str, int]:
    """Runs a command there, its output line by line here; returns the first line that is an error, else the last, and the exit code."""
    last = ""
    argv = arguments(host, inventory, words, tty=True)  # with a terminal it ends when this command does
    with (
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
        waited_for(process),
    ):
        assert process.stdout is not None
        for raw in iter(process.stdout.readline, b""):
            line = COLOURS.sub("", raw.decode("utf-8", "replace")).rstrip()
            if line:
                last = last if last.lower().startswith("error") else line
                say(host, line)
    return re.sub(r"^error: ", "", last, flags=re.IGNORECASE), process.returncode
