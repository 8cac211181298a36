"""The Makefile, the table of commands and the documents name the same things."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from sft_play.__main__ import COMMANDS
from tests.conftest import NOT_INHERITED
from tests.documents import ROOT, documented_commands, documents

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def makefile_commands() -> set[str]:
    listed = re.search(r"^override commands := ((?:.*\\\n)*.*)$", MAKEFILE, re.M)
    assert listed
    return set(listed.group(1).replace("\\\n", " ").split())


def makefile_targets() -> set[str]:
    return makefile_commands() | set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M))


def test_every_command_is_a_target_and_the_other_way_round() -> None:
    assert makefile_commands() == set(COMMANDS)


def test_help_has_one_line_for_each_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "sft_play", "help"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    for name, command in COMMANDS.items():
        assert len(re.findall(rf"^  {re.escape(name)} +{re.escape(command.help)}$", shown, re.M)) == 1, name


def test_the_table_of_variables_is_the_commands() -> None:
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    section = text.partition("\n## Variables\n")[2].partition("\n## ")[0]
    by_command, meanings = section.partition("| name | meaning |")[::2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in by_command.splitlines() if line.startswith("| `")]
    listed = {name: right for left, right in rows for name in re.findall("`(.*?)`", left)}
    assert set(listed) == set(COMMANDS)
    for name, command in COMMANDS.items():
        assert set(re.findall("`(.*?)`", listed[name])) == command.options, name
        assert ("keys" in listed[name]) == command.overrides, name
    explained = {
        name for line in meanings.splitlines() for name in re.findall("`([A-Z_]+)`", line.partition("| ")[2].partition(" |")[0])
    }
    assert explained == {option for command in COMMANDS.values() for option in command.options}


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_name_only_targets_that_exist(document) -> None:
    named = set(re.findall(r"(?:^|`|&& )make ([a-z][a-z0-9-]+)", document.read_text(encoding="utf-8"), re.M))
    assert named <= makefile_targets()


def dry(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return subprocess.run(
        ["make", "-n", "-o", ".venv/.runtime", "-o", ".venv/.dev", "-o", ".venv/.bench", *words],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["test", "FOO=2", "TRAIN_X=1"], ("FOO", "TRAIN_X")),
        (["check", "TESTS=tests/unit"], ("TESTS",)),
        (["install", "bin=/x"], ("bin",)),
        (["format", "render", "RUN=x"], ("RUN",)),
        (["bench-training", "CONFIG=$(shell false)"], ("CONFIG",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_targets_that_are_no_commands_refuse_variables_too(words: list[str], named: tuple[str, ...]) -> None:
    done = dry(*words)
    assert done.returncode == 2 and "takes no " in done.stderr
    assert all(name in done.stderr.partition("takes no ")[2] for name in named)


@pytest.mark.parametrize(
    "words", [["test", "TESTS=tests/unit", "PYTHON=python3.12"], ["check"], ["install", "config", "CONFIG=x"]]
)
def test_known_variables_are_taken(words: list[str]) -> None:
    assert dry(*words).returncode == 0


@pytest.mark.parametrize("typed", ["bin=/x", "program=echo", "commands=z", "typed=z", "v=z", "SHELL=/x", "unknown=z"])
def test_no_variable_changes_a_recipe(typed: str) -> None:
    assert dry("config", typed).stdout == dry("config").stdout == ".venv/bin/python -m sft_play config --from-make\n"


def test_documented_commands_call_make_or_scripts_that_exist() -> None:
    assert documented_commands(), "no command was found in any document"
    for command in documented_commands():
        program = command.words[0]
        assert program in {"make", "git", "cd", "python", "accelerate"} or (ROOT / program).exists(), command


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
