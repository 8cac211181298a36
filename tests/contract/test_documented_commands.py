"""Every command in the documents is one that the program takes; those that only look are run as they stand."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.command_line import parse_call
from sft_play.errors import UserError
from tests.conftest import Program
from tests.documents import ROOT, DocumentedCommand, documented_commands

LOOKING = {"config", "plan", "gpu-info", "memory-check", "help"}
MEASURED = {"trace", "probe"}
"""Sources of a plan that take long: tests/numerics/test_trace_models.py, tests/distributed/test_probe.py."""
READERS_OWN = re.compile(r"my\.(yaml|json)|your|file\.(yaml|json)|x\.yaml|runs/demo/")
"""Files that a reader is to have; the repository has none of them."""
UNIQUE = list({command.text: command for command in documented_commands()}.values())


def parts(command: DocumentedCommand) -> list[list[str]]:
    """Returns the make calls of a line; `&&`, `;` and pipes separate them."""
    calls = [shlex.split(part, comments=True) for part in re.split(r"&&|;|\|", command.text)]
    found = []
    for words in calls:
        typed = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))  # after variables of the shell
        if typed and typed[0] == "make":
            found.append(typed[1:])
    return found


@pytest.mark.parametrize("command", UNIQUE, ids=lambda command: f"{command.document}:{command.line}")
def test_the_program_takes_what_documents_say(command: DocumentedCommand, in_process: Program) -> None:
    for words in parts(command):
        if not words or words[0] not in COMMANDS:  # install, test, check: the Makefile's own, held by test_makefile.py
            continue
        call = parse_call(words, COMMANDS)
        if READERS_OWN.search(command.text):
            continue
        for name in ("CONFIG", "DEEPSPEED_CONFIG"):
            path = call.options.get(name)
            assert path is None or (ROOT / path).is_file() or (ROOT / "configs" / f"{path}.yaml").is_file(), command
        if call.options.get("CONFIG"):
            try:
                call.load_config()
            except UserError as error:
                pytest.fail(f"{command.document}:{command.line}: {error.render()}")
        if words[0] in LOOKING and "RUN" not in call.options and call.options.get("SOURCE") not in MEASURED:
            done = in_process(*words)
            assert done.code == 0, (command, done.err)


def test_examples_each_have_a_readme_with_one_command() -> None:
    folders = sorted(p for p in (ROOT / "examples").iterdir() if p.is_dir())
    assert len(folders) >= 6
    for folder in folders:
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert len(re.findall(r"^```bash\n", text, re.M)) == 1, folder.name
        assert list(folder.glob("*.yaml")), folder.name
        assert Path(folder.name[3:]).name and folder.name[:2].isdigit()
