"""`make cluster-install`: the project and its environment on every machine of an inventory, by the project's own `scripts/install.sh` there.

The same command continues where it stopped: files that are there are not sent again, and an environment that is newer than the pinned versions is
left as it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import PurePosixPath

from sft_play.cluster.bring import code_files, send_code
from sft_play.cluster.findings import minor, other_versions, versions_remedy
from sft_play.cluster.hosts import (
    HOME,
    arguments,
    facts_of,
    in_folder,
    is_here,
    login,
    on_all,
    print_line,
    require_master_here,
    start,
)
from sft_play.cluster.inventory import Host, inventory_for_call
from sft_play.cluster.remote import Facts
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError, printable
from sft_play.runs.origin import OPTIONAL

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
"""Takes this machine's Python version (`3.11`), the environment's folder, and `keep` where one that is newer than the pins stays.

Runs in the project's folder."""
AGAIN = "then type the same command again"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What pip writes to a terminal apart from letters."""


def main(call: Call) -> int:
    """Install on all machines at once; return 0 when all are ready, else 3."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    files = code_files(report=True)
    for host in inventory.hosts:
        venv_of(host)  # what cannot be installed into is reported before anything is sent
    own = facts_of(inventory.master)
    found = on_all(inventory.hosts, lambda host: install(host, files, own))
    failed = [name for name, one in found.items() if isinstance(one, UserError)]
    if call.json:
        rows = {name: (one.message, one.hint) if isinstance(one, UserError) else (one, None) for name, one in found.items()}
        print(json.dumps([{"host": n, "ok": n not in failed, "detail": text, "hint": hint} for n, (text, hint) in rows.items()]))
        return HardwareError.exit_code if failed else 0
    for name, one in found.items():
        if isinstance(one, UserError):
            print(f"failed  {name}: {one.message}" + (f"\n        hint: {one.hint}" if one.hint else ""), file=sys.stderr)
        else:
            print(f"ready  {name}: {one}")
    if failed:
        hint = "fix the error above and repeat the command: finished work is kept"
        print(f"\nerror: {', '.join(f'`{name}`' for name in failed)} cannot be used yet\n\nhint: {hint}", file=sys.stderr)
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
    """Bring the project to one machine and make its environment, with the versions of this one (`own`); return what it has then.

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
            print_line(f"{host.name} | its versions are others: {', '.join(apart.values())}; installing the pinned ones")
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
    """Run a command, its output line by line here; return the first line that is an error, else the last, and the exit code."""
    last = ""
    with start(argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for raw in iter(process.stdout.readline, b""):
            line = COLOURS.sub("", raw.decode("utf-8", "replace")).rstrip()
            if line:
                last = last if last.lower().startswith("error") else line
                print_line(f"{host.name} | {printable(line)}")
    return re.sub(r"^error: ", "", last, flags=re.IGNORECASE), process.returncode
