"""Which model a name means, and the errors if there is none: folders, and a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError
from sft_play.model.resolve import resolve_model
from tests.conftest import ROOT, environment
from tests.documents import on_page
from tests.hub import COMMIT, FilesHandler, HubHandler, serve


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """Return a copy of a model that a test may break."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def refused(name: Path | str) -> DataError:
    with pytest.raises(DataError) as caught:
        resolve_model(ModelConfig(name=str(name)))
    return caught.value


def test_one_changed_byte_of_weights_or_tokenizer_changes_its_fingerprint(model: Path) -> None:
    first, weights = resolve_model(ModelConfig(name=str(model))), model / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times
    other = resolve_model(ModelConfig(name=str(model)))
    assert other.fingerprint != first.fingerprint and other.tokenizer_fingerprint == first.tokenizer_fingerprint
    (model / "chat_template.jinja").write_text("{{ messages }}")
    changed = resolve_model(ModelConfig(name=str(model)))
    assert changed.fingerprint == other.fingerprint and changed.tokenizer_fingerprint != other.tokenizer_fingerprint


SHARDS = json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})


@pytest.mark.parametrize(
    ("missing", "written", "message", "hint"),
    [
        ("config.json", {}, "the model has no `config.json`", "a model folder contains"),
        ("model.safetensors", {}, "the model has no weights", "it needs `model.safetensors`"),
        ("tokenizer*", {}, "the model has no tokenizer", "it needs `tokenizer.json`"),
        (
            "",
            {"model.safetensors.index.json": SHARDS},
            "1 of 2 weight files are missing: `model-00002-of-00002.safetensors`",
            "",
        ),
        # transformers would load the adapter too, and not report the weights that are missing.
        (
            "",
            {"adapter_config.json": "{}"},
            "this model folder contains an adapter too",
            "merge the adapter into the model first",
        ),
        (
            "config.json",
            {"adapter_config.json": "{}"},
            "this is an adapter, not a model",
            "set `model.name` to the base model",
        ),
    ],
)
def test_a_folder_that_is_not_a_complete_model_is_named_with_what_it_lacks(
    missing: str, written: dict[str, str], message: str, hint: str, model: Path
) -> None:
    for path in model.glob(missing) if missing else ():
        path.unlink()
    for name, text in written.items():
        (model / name).write_text(text)
    error = refused(model)
    assert error.place == str(model)
    assert error.message.startswith(message) and hint in (error.hint or "")


def test_weights_that_were_not_fetched_completely_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    error = refused(model)
    assert error.place == str(weights) and "is cut short" in error.message
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS pointer" in refused(model).message and "git lfs pull" in (refused(model).hint or "")


@pytest.mark.parametrize("name", ["./missing", "missing/deep/folder", "~/missing_model_of_a_test"])
def test_a_missing_folder_is_named(name: str) -> None:
    error = refused(name)
    assert (error.place, error.message) == (name, "there is no such model folder")


# ---- A hub on this machine


class RefusingHandler(HubHandler):
    """Refuses everything with one status and code, and keeps the tokens that it was shown."""

    status: int
    code: str
    tokens: list[str | None]

    def do_GET(self) -> None:
        self.tokens.append(self.headers.get("Authorization"))
        self.refuse(self.status, self.code)


Ask = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import sys
from sft_play.config.schema import Config, ModelConfig
from sft_play.errors import UserError
from sft_play.model.scratch import describe_source, resolve
config = Config(model=ModelConfig(name="someone/small", revision=sys.argv[1] or None))
try:
    found = resolve(config)
except UserError as error:
    print(error.render(), file=sys.stderr)
    sys.exit(error.exit_code)
print(describe_source(config, found))
print(found.path)
"""


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Resolve `someone/small` in a separate process: the hub's library reads its address once, at its import."""

    def run(hub: str, *, revision: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        extra = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            **variables,
        }
        env = environment(tmp_path / "cache", tmp_path / "runs", extra | {"NO_PROXY": "127.0.0.1"})
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, revision],
            capture_output=True,
            text=True,
            env=env,
            cwd=ROOT,
            timeout=240,
            check=False,
        )

    return run


def test_a_model_is_fetched_and_found_again_offline(ask: Ask, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    with serve(FilesHandler, kind="models", name="someone/small", files=files) as hub:
        done = ask(hub)
    assert done.returncode == 0, done.stderr
    first, path = done.stdout.splitlines()
    assert first == f"model: someone/small, from the hub at commit {COMMIT[:12]}"
    assert (Path(path) / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert ask(hub, HF_HUB_OFFLINE="1").stdout == done.stdout


@pytest.mark.parametrize(("status", "token"), [(401, None), (403, "hf_without_access")])
def test_a_gated_model_names_the_licence_page_and_the_token(status: int, token: str | None, ask: Ask) -> None:
    shown: list[str | None] = []
    with serve(RefusingHandler, status=status, code="GatedRepo", tokens=shown) as hub:
        done = ask(hub, HF_TOKEN=token or "")
    assert done.returncode == 4 and "error: someone/small: the model is gated" in done.stderr
    message = "the token that is set has no access to it"
    assert message in done.stderr if token else on_page("401-403-or-a-gated-model", done.stderr)
    assert "https://huggingface.co/someone/small" in done.stderr and "HF_TOKEN" in done.stderr
    assert shown[-1] == (f"Bearer {token}" if token else None)


@pytest.mark.parametrize(
    ("code", "revision", "message"),
    [
        ("RepoNotFound", "", "the hub has no such model, or it is private"),
        ("RevisionNotFound", "v9", "the model has no revision `v9`"),
    ],
)
def test_an_unknown_name_or_revision_of_the_hub_is_refused(code: str, revision: str, message: str, ask: Ask) -> None:
    with serve(RefusingHandler, status=404, code=code, tokens=[]) as hub:
        done = ask(hub, revision=revision)
    assert done.returncode == 4 and f"error: someone/small: {message}" in done.stderr


def test_a_proxy_that_refuses_is_an_unreachable_hub(ask: Ask) -> None:
    with serve(RefusingHandler, status=403, code="", tokens=[]) as proxy:  # which knows no `CONNECT`
        done = ask("https://huggingface.co", HTTPS_PROXY=proxy, https_proxy=proxy)
    assert done.returncode == 4 and "error: someone/small: no such folder, and the hub cannot be reached" in done.stderr
