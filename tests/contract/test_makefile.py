"""The Makefile, the table of commands and the documents name the same things."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS, MAKEFILE_TARGETS, main
from tests.conftest import NOT_INHERITED
from tests.documents import ROOT, documents

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


HERE = (f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.runtime")
"""Words for make to use the environment of this Python."""
CLEAN = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def makefile_commands() -> set[str]:
    listed = re.search(r"^override commands := ((?:.*\\\n)*.*)$", MAKEFILE, re.M)
    assert listed
    return set(listed.group(1).replace("\\\n", " ").split())


def makefile_targets() -> set[str]:
    return makefile_commands() | set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M))


def test_commands_and_targets_are_the_same() -> None:
    assert makefile_commands() == set(COMMANDS)
    assert makefile_targets() - makefile_commands() == set(MAKEFILE_TARGETS)


def test_help_has_one_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    for name, text in {name: command.help for name, command in COMMANDS.items()}.items() | MAKEFILE_TARGETS.items():
        assert len(re.findall(rf"^  {re.escape(name)} +{re.escape(text)}$", shown, re.M)) == 1, name


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_lists_its_own_variables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"sft-play {name} NAME=value" in shown and COMMANDS[name].help in shown
    listed = set(re.findall(r"^  ([A-Z_]+)  +\S", shown, re.M))
    assert listed == COMMANDS[name].options | ({"SECTION_KEY"} if COMMANDS[name].overrides else set())


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_name_only_targets_that_exist(document) -> None:
    named = set(re.findall(r"(?:^|`|&& )make ([a-z][a-z0-9-]+)", document.read_text(encoding="utf-8"), re.M))
    assert named <= makefile_targets()


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make in the repository, with all installed."""
    installed = ["-o", ".venv/.runtime", "-o", ".venv/.dev", "-o", ".venv/.bench"]
    return subprocess.run(
        ["make", *installed, *words],
        cwd=ROOT,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["test", "FOO=2", "TRAIN_X=1"], "takes no TRAIN_X FOO"),
        (["check", "TESTS=tests/unit"], "takes no TESTS"),
        (["bench-training", "CONFIG=$(shell false)"], "takes no CONFIG"),
        (["plan", "tickets.yaml"], "`tickets.yaml` is no target: make plan CONFIG=tickets.yaml"),
        (["test", "TESTS=a\ntouch x"], "contains a newline; write it on one line"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_targets_that_are_not_commands_refuse_variables_and_newlines_too(words: list[str], message: str) -> None:
    done = make("-n", *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_variable_of_an_outer_make_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(f"ci:\n\t@$(MAKE) -C {ROOT} plan CONFIG=quickstart\n")
    done = subprocess.run(
        ["make", "ci", "ENV=prod"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=60, check=False
    )
    assert "unknown variable `ENV`, perhaps of an outer make" in done.stderr and "MAKEOVERRIDES =" in done.stderr, (
        done.stderr
    )


def test_make_elsewhere_or_with_b_is_refused_with_the_right_way(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\n")
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    (clone / "scripts" / "install.sh").touch()
    (clone / "Makefile").symlink_to(ROOT / "Makefile")
    errors = []
    for words, folder in (
        (["plan"], tmp_path),
        (["plan"], clone),
        (["-f", f"{ROOT}/Makefile", "plan"], tmp_path),
        (["-B", "plan"], ROOT),
        (["plan", "-nB"], ROOT),
    ):
        done = subprocess.run(
            ["make", *words], cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2 and f"type `make -C {ROOT} ...`" in done.stderr and not done.stdout, done.stderr
        errors.append(done.stderr)
    assert all("its own folder" in error for error in errors[:3]) and all("`-B` would" in error for error in errors[3:])
    assert make("-n", "config", "BUILD=B").returncode == 0, "a variable is no option"


@pytest.mark.parametrize("typed", ["bin=/x", "program=echo", "commands=z", "typed=z", "SHELL=/x"])
def test_no_variable_changes_a_recipe(typed: str) -> None:
    assert make("-n", "config", typed).stdout == ".venv/bin/python -m sft_play config --from-make\n"


AWKWARD = ['"; touch x; "', "$(touch x)", "$(shell touch x)", "`touch x`", "two words", "it's", "a#b", "a\\"]
"""Values that make or a shell would read, were they not quoted."""


@pytest.mark.parametrize("value", AWKWARD)
@pytest.mark.parametrize(
    ("goal", "name"),
    [("test", "TESTS"), ("bench-preparation", "ROWS"), ("install", "PYTHON")],
)
def test_values_reach_the_program_verbatim(goal: str, name: str, value: str, tmp_path: Path) -> None:
    """Run the recipe with programs that write their arguments down, typed and from the environment."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for program in (tmp_path / "v/bin/python", tmp_path / "scripts/install.sh"):
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" > said\n")
        program.chmod(0o755)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "pyproject.toml").touch()
    done = [] if goal == "install" else ["-o", "v/.runtime", "-o", "v/.dev", "-o", "v/.bench"]
    for words, environ in (([f"{name}={value}"], CLEAN), ([], {**CLEAN, name: value})):
        command = ["make", goal, "VENV=v", *done, *words]
        subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=240, check=True)
        arguments = (tmp_path / "said").read_text().split("\0")
        assert {"ROWS": f"rows={value}"}.get(name, value) in arguments
        (tmp_path / "said").unlink()
        assert not (tmp_path / "x").exists()


def test_unsloths_environment_is_made_again_when_its_pins_are_newer(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("scripts/install.sh", "constraints.txt", "constraints-unsloth.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def installs(*words: str) -> bool:
        command = ["make", "-n", *words, "VENV=v", "-o", "v/.runtime"]
        return "v unsloth" in subprocess.check_output(command, cwd=tmp_path, env=CLEAN, text=True, timeout=240)

    assert not installs("runs"), "nobody asked for it"
    assert installs("install-unsloth")
    installed = tmp_path / "v-unsloth" / ".installed"
    installed.parent.mkdir()
    installed.touch()
    assert not installs("runs") and not installs("install-unsloth")
    os.utime(installed, (0, 0))
    assert installs("runs") and installs("install-unsloth")


@pytest.mark.parametrize("value", [*AWKWARD, "", "a\nb", "~/v", "a:b", "a=b", "a%b", "(a", "-x"])
def test_a_folder_name_with_characters_special_to_make_or_a_shell_is_refused(value: str) -> None:
    done = make("-n", "config", f"VENV={value}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"`VENV` is `{value}` (refused: " in done.stderr
    assert "give a path without spaces" in done.stderr


def test_a_folder_in_the_environment_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLEAN, "VENV", "other")
    done = make("-n", "config")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`VENV` is in the environment: type `make ... VENV=other`, or `unset VENV`" in done.stderr
    assert make("-n", "config", "VENV=v", "-o", "v/.runtime").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train-distribted", "CONFIG=x"],
            "there is no target `train-distribted`\n\nhint: did you mean `make train-distributed`?",
        ),
        (["it's;x$HOME\"`y"], "there is no target `it's;x$HOME\"`y`\n\nhint: `make help` lists all commands"),
        (
            ["slurm", "SLURM_GRES=gpu:4", "MIXED_PRECISION=fp16"],
            "did you mean `NUM_GPUS=...` (processes on this machine)? It takes a number",
        ),
    ],
)
def test_mistyped_words_are_refused_with_the_right_one(words: list[str], message: str) -> None:
    done = make(*HERE, *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
