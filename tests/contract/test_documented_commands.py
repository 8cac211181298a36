"""The documents hold: every command is one the program takes, every quoted message, link and measured page is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.harness import MARK
from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from tests.conftest import Program
from tests.documents import ROOT, DocumentedCommand, documented_commands, documents, sections_of_troubleshooting

LOOKING = {"config", "plan", "gpu-info", "memory-check", "help"}
MEASURED = {"trace", "probe"}
"""Sources of a plan that take long: tests/numerics/test_trace_models.py, tests/distributed/test_probe.py."""
READERS_OWN = re.compile(r"my\.(yaml|json)|your|file\.(yaml|json)|x\.yaml|runs/demo/|MODEL_ADAPTER=")
"""Files that a reader is to have; the repository has none of them."""
UNIQUE = list({command.text: command for command in documented_commands()}.values())


def parts(command: DocumentedCommand) -> list[list[str]]:
    """Return the make calls of a line; `&&`, `;` and pipes separate them."""
    split = re.split(r"&&|;|\|", command.text) if "make " in command.text else []
    lines = [shlex.split(part, comments=True) for part in split]
    return [words[words.index("make") + 1 :] for words in lines if "make" in words]


@pytest.mark.parametrize("command", UNIQUE, ids=lambda command: f"{command.document}:{command.line}")
def test_the_program_accepts_what_documents_say(command: DocumentedCommand, in_process: Program) -> None:
    for words in parts(command):
        if not words or words[0] not in COMMANDS:  # install, test, check: the Makefile's own, held by test_makefile.py
            continue
        call = parse_call(words, COMMANDS)
        if READERS_OWN.search(command.text):
            continue
        for name in ("CONFIG", "DEEPSPEED_CONFIG"):
            path = call.options.get(name)
            assert path is None or (ROOT / path).is_file() or (ROOT / "configs" / f"{path}.yaml").is_file(), command
        if call.options.get("CONFIG") == "run_unsloth":
            continue  # another environment carries it out: tests/contract/test_unsloth.py
        if call.options.get("CONFIG"):
            call.load_config()
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


@pytest.mark.parametrize(
    "name", ["benchmarks", "benchmarks-evaluation", "benchmarks-preparation", "benchmarks-saving", "memory"]
)
def test_a_page_of_figures_keeps_within_its_bounds(name: str) -> None:
    introduction, mark, measured = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition(MARK)
    assert f"write=docs/{name}.md" in introduction and mark and measured
    assert "NOT ALL" not in measured


SYMPTOMS = {
    "nccl-timeout",
    "connect-call-failed",
    "hangs-after-initialized",
    "cuda-out-of-memory",
    "one-gpu-slower-than-the-others",
    "process-group-not-initialized",
    "gpu-utilization-low",
    "loss-is-nan",
    "no-space-left",
    "401-403-or-a-gated-model",
    "expected-scalar-type",
    "checkpoint-of-another-backend",
    "address-already-in-use",
    "different-versions-on-machines",
    "slow-training-over-ethernet",
}


def sources(folder: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def test_every_quoted_message_is_compared_by_a_test_that_produces_it() -> None:
    quoted = {anchor for anchor, text in sections_of_troubleshooting().items() if text}
    assert set(sections_of_troubleshooting()) == SYMPTOMS and len(quoted) == len(SYMPTOMS) - 1
    assert quoted == set(re.findall(r'on_page\("([a-z0-9-]+)"', sources("tests")))


def test_messages_name_sections_that_exist() -> None:
    named = set(re.findall(r"docs/troubleshooting\.md#([a-z0-9-]+)", sources("sft_play")))
    assert named and named <= SYMPTOMS


LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return what a page's headings are called in links, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_have_a_target(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: `{link}` leads to nothing"
        assert not anchor or anchor in anchors(target), f"{page.name}: `{link}`: no such heading"


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_named_in_documents_exists(page: Path) -> None:
    for name, word in re.findall(r"`([a-z_/0-9]+\.py)(?:: (\w+))?", page.read_text(encoding="utf-8")):
        files = [
            path
            for folder in ("sft_play", "tests", "scripts", "benchmarks")
            for path in ROOT.glob(f"{folder}/**/{name.split('/')[-1]}")
        ]
        named = [path.read_text(encoding="utf-8") for path in files if str(path).endswith(f"/{name}")]
        assert named, f"{page.name}: there is no `{name}`"
        assert not word or re.search(rf"^(?:    )?(?:def |class )?{word}\b", named[0], re.M), (
            f"{page.name}: no `{word}` in `{name}`"
        )
