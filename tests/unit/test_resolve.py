"""Which model a name means, and what is said where there is none: folders, and a hub that answers from this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError
from sft_play.model.resolve import resolve_model
from tests.conftest import ROOT, environment
from tests.documents import on_page
from tests.hub import HubHandler, serve

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
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


def test_a_model_folder_with_an_adapter_in_it_is_refused(model: Path) -> None:
    """transformers would load the adapter too, and not report the weights that are missing."""
    (model / "adapter_config.json").write_text("{}")
    assert "holds an adapter too" in refused(model).message
    (model / "config.json").unlink()
    error = refused(model)
    assert "adapter, not a model" in error.message and error.hint == "set `model.name` to the base model"


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "no `config.json`"), ("model.safetensors", "no weights"), ("tokenizer*", "no tokenizer")],
)
def test_a_folder_that_lacks_something_is_named_with_it(missing: str, named: str, model: Path) -> None:
    for path in model.glob(missing):
        path.unlink()
    error = refused(model)
    assert error.place == str(model)
    assert named in error.message


def test_weights_that_were_not_fetched_completely_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    error = refused(model)
    assert error.place == str(weights) and "is cut short" in error.message
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS pointer" in refused(model).message and "git lfs pull" in (refused(model).hint or "")


def test_a_missing_shard_is_named(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 2 weight files are missing: `model-00002-of-00002.safetensors`" in refused(model).message


@pytest.mark.parametrize("name", ["./missing", "missing/deep/folder", "~/missing_model_of_a_test"])
def test_a_missing_folder_is_named(name: str) -> None:
    error = refused(name)
    assert (error.place, error.message) == (name, "there is no such model folder")


# ---- A hub on this machine

Answer = tuple[int, dict[str, str], bytes]


class Hub:
    """What a hub answers, by its paths; unknown ones are 404 without a word."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.tokens: list[str | None] = []
        self.address = ""

    def refuse(self, path: str, status: int, code: str) -> None:
        self.answers[path] = (status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}")

    def repository(self, name: str, files: dict[str, bytes]) -> None:
        listing = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
        tree = [{"type": "file", "path": file, "size": len(body), "oid": "0" * 40} for file, body in files.items()]
        for revision in ("main", SHA):
            self.answers[f"/api/models/{name}/revision/{revision}"] = (200, {}, json.dumps(listing).encode())
            self.answers[f"/api/models/{name}/tree/{revision}"] = (200, {}, json.dumps(tree).encode())
            for file, body in files.items():
                headers = {"X-Repo-Commit": SHA, "ETag": f'"{abs(hash(file)):040x}"'}
                self.answers[f"/{name}/resolve/{revision}/{file}"] = (200, headers, body)
        self.answers[f"/api/models/{name}"] = (200, {}, json.dumps(listing).encode())


class TableHandler(HubHandler):
    hub: Hub

    def do_GET(self) -> None:
        self.hub.tokens.append(self.headers.get("Authorization"))
        status, headers, body = self.hub.answers.get(self.path.partition("?")[0], (404, {}, b"{}"))
        self.send(status, body, headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    with serve(TableHandler, hub=made) as made.address:
        yield made


Ask = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import sys
from sft_play.config.schema import ModelConfig
from sft_play.errors import UserError
from sft_play.model.resolve import describe_source, resolve_model
try:
    found = resolve_model(ModelConfig(name=sys.argv[1], revision=sys.argv[2] or None))
except UserError as error:
    print(error.render(), file=sys.stderr)
    sys.exit(error.exit_code)
print(describe_source(found))
print(found.path)
"""


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Ask:
    """Resolves a name in a process of its own: the hub's library reads its address once, when it is imported."""

    def run(
        name: str, *, token: str | None = None, revision: str = "", offline: bool = False
    ) -> subprocess.CompletedProcess[str]:
        extra = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": str(int(offline))}
        env = environment(tmp_path / "cache", tmp_path / "runs", extra | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"})
        for variable in [name for name in env if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "hf_token")]:
            del env[variable]
        if token:
            env["HF_TOKEN"] = token
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, name, revision],
            capture_output=True, text=True, env=env, cwd=ROOT, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_a_model_is_fetched_and_found_again_offline(hub: Hub, ask: Ask, tiny: Path) -> None:
    hub.repository("someone/small", {path.name: path.read_bytes() for path in tiny.iterdir()})
    done = ask("someone/small")
    assert done.returncode == 0, done.stderr
    first, path = done.stdout.splitlines()
    assert first == f"model: someone/small, from the hub at commit {SHA[:12]}"
    assert (Path(path) / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert ask("someone/small", offline=True).stdout == done.stdout


@pytest.mark.parametrize(("status", "token"), [(401, None), (403, "hf_without_access")])
def test_a_gated_model_names_the_licence_page_and_the_token(status: int, token: str | None, hub: Hub, ask: Ask) -> None:
    hub.refuse("/api/models/meta/gated", status, "GatedRepo")
    done = ask("meta/gated", token=token)
    assert done.returncode == 4 and "error: meta/gated: the model is gated" in done.stderr
    said = "the token that is set has no access to it"
    assert said in done.stderr if token else on_page("401-403-or-a-gated-model", done.stderr)
    assert "https://huggingface.co/meta/gated" in done.stderr and "HF_TOKEN" in done.stderr
    assert hub.tokens[-1] == (f"Bearer {token}" if token else None)


@pytest.mark.parametrize(
    ("path", "code", "revision", "said"),
    [
        ("/api/models/nobody/nothing", "RepoNotFound", "", "the hub has no such model, or it is private"),
        ("/api/models/nobody/nothing/revision/v9", "RevisionNotFound", "v9", "the model has no revision `v9`"),
    ],
)
def test_a_name_or_revision_that_the_hub_does_not_have(
    path: str, code: str, revision: str, said: str, hub: Hub, ask: Ask
) -> None:
    hub.refuse(path, 404, code)
    done = ask("nobody/nothing", revision=revision)
    assert done.returncode == 4 and f"error: nobody/nothing: {said}" in done.stderr
