#!/usr/bin/env bash
# Makes or brings up to date the virtual environment: scripts/install.sh PYTHON VENV runtime|dev|bench|audit|oldest|unsloth
# pip's own settings (an index, a proxy, a CPU-only torch build) are honoured through pip's environment variables and files.
set -euo pipefail
python=$1 venv=$2 group=$3
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v "$python" >/dev/null; then
    printf 'error: `%s` is not on the PATH\n\nhint: install Python 3.11 or newer, or name one: make install PYTHON=python3.11\n' "$python" >&2
    exit 3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    printf 'error: `%s` is %s; SFT-Play needs Python 3.11 or newer\n\nhint: name another: make install PYTHON=python3.11\n' \
        "$python" "$("$python" --version 2>&1)" >&2
    exit 3
fi
if [ ! -x "$venv/bin/python" ]; then
    echo "making a virtual environment in $venv"
    if ! "$python" -m venv "$venv"; then
        printf 'error: `%s -m venv` failed\n\nhint: on Debian and Ubuntu: apt-get install python3-venv\n' "$python" >&2
        rm -rf -- "$venv"
        exit 3
    fi
fi

# To install into an environment of another clone would change the program under a run that is training there.
owner=$("$venv/bin/python" -I - "$PWD" "$venv" <<'END'
import importlib.metadata, json, os, sys
from urllib.parse import unquote, urlsplit

here, venv = map(os.path.realpath, sys.argv[1:])
try:
    url = json.loads(importlib.metadata.distribution("sft-play").read_text("direct_url.json") or "{}").get("url", "")
except importlib.metadata.PackageNotFoundError:
    url = ""
path = os.path.realpath(unquote(urlsplit(url).path)) if url.startswith("file:") else ""
# A copy of an environment that lies in this clone is this clone's.
if path and os.path.isdir(path) and path != here and not venv.startswith(here + os.sep):
    print(path)
END
)
if [ -n "$owner" ]; then
    printf 'error: `VENV` is `%s`, the environment of the clone in `%s`\n\nhint: omit VENV for one of this clone; or where nothing runs from it any more: %s -m pip uninstall --yes sft-play\n' \
        "$venv" "$owner" "$venv/bin/python" >&2
    exit 3
fi

install() { "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
stamp=$venv/.$group
case $group in
    runtime)
        echo "installing the pinned packages into $venv (some minutes, once)"
        # torch first and alone: DeepSpeed's build looks at the torch that is there.
        install torch
        install --editable .
        ;;
    dev) echo "installing the test and lint tools into $venv" && install --editable '.[dev]' ;;
    bench) echo "installing the trackers and what benchmarks compare with into $venv" && install --editable '.[bench,trackers]' ;;
    audit) echo "installing what asks for known holes into $venv" && install --editable '.[audit]' ;;
    oldest | unsloth)  # an environment that sees all of this one, with other versions laid over it
        echo "laying constraints-$group.txt over $venv, in $venv-$group (some minutes, once)"
        rm -rf -- "$venv-$group"
        stamp=$venv-$group/.installed
        "$venv/bin/python" -m venv --without-pip "$venv-$group"
        own=$("$venv-$group/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$venv/bin/python" -c 'import site; print(f"import site; list(map(site.addsitedir, {site.getsitepackages()}))")' >"$own/base.pth"
        # What Unsloth names beside these, its imports do without.
        if [ "$group" = unsloth ]; then alone=(--no-deps); else alone=(); fi
        "$venv/bin/python" -m pip --python "$venv-$group/bin/python" install --quiet --quiet --disable-pip-version-check \
            "${alone[@]}" --requirement "constraints-$group.txt"
        ;;
    *) echo "usage: scripts/install.sh PYTHON VENV runtime|dev|bench|audit|oldest|unsloth" >&2 && exit 2 ;;
esac
touch "$stamp"
