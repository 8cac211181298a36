"""Finds the base model: a folder, a hub snapshot, or the embedded model when no hub answers. Says what it took."""

from __future__ import annotations

from pathlib import Path

from sft_play.config.schema import ModelConfig
from sft_play.errors import DataError, first_line
from sft_play.files import file_sha256, text_sha256
from sft_play.model.embedded import LABEL, embedded_folder, is_embedded
from sft_play.model.folder import check_folder, weight_files, weights_sha256
from sft_play.plan.hub import hub_reachable
from sft_play.runs.prepared import ResolvedModel

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
"""Files of a hub repository that are fetched; `.bin` weights only where there are no safetensors."""
SMALL = [
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "merges.txt",
]
"""Files that tell a model's shape and tokenizer."""
UNWANTED = ["original/*", "consolidated*", "onnx/*", "gguf/*"]
"""Copies of the same weights for other programs."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def resolve_model(model: ModelConfig) -> ResolvedModel:
    """Returns where the model is, downloading it when it must. Raises `DataError` with what to do."""
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return describe(model.name, _checked(folder, model.name), "folder", None)
    if folder.suffix == ".gguf":
        hint = "take the model that the file was made from, by its hub id or as a folder"
        raise DataError("GGUF files cannot be trained", place=model.name, hint=hint)
    if folder.is_file():
        raise DataError("is a file; a model is a folder or a hub id", place=model.name, hint=f"perhaps `{folder.parent}`")
    if model.name.startswith((".", "/", "~")) or model.name.count("/") > 1:
        hint = "paths count from the folder in which you typed make"
        raise DataError("there is no such model folder", place=model.name, hint=hint)
    cached = _cached(model)
    if cached is None and is_embedded(model.name) and not hub_reachable():
        return describe(model.name, embedded_folder(), "embedded", None)
    path = cached or _download(model)
    return describe(model.name, _checked(path, model.name), "hub", path.name)


def small_files(name: str, revision: str | None) -> Path:
    """Returns a folder with the config and tokenizer of a folder or hub id; no weights are fetched. Raises `DataError`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.is_file():
        raise DataError("there is no such folder", place=name, hint="paths count from the folder in which you typed make")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError, HFValidationError, ValueError):
        if is_embedded(name) and not hub_reachable():
            return embedded_folder()
    return _download(ModelConfig(name=name, revision=revision), SMALL)


def says(model: ResolvedModel) -> str:
    """Returns one line for the user: which model, from where."""
    if model.source == "embedded":
        return f"model: {LABEL}, from a package: the hub cannot be reached"
    origin = f"from the hub at commit {(model.revision or '')[:12]}" if model.source == "hub" else f"from the folder {model.path}"
    return f"model: {model.name}, {origin}"


def _cached(model: ModelConfig) -> Path | None:
    """Returns the snapshot that earlier runs fetched, if it is whole enough to load."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError, HFValidationError, ValueError):
        return None
    try:
        check_folder(path, model.name)
    except DataError:  # an interrupted download: the rest is fetched
        return None
    return path


def _download(model: ModelConfig, only: list[str] | None = None) -> Path:
    """Fetches a model, or `only` the files of these patterns. Raises `DataError`."""
    from huggingface_hub import HfApi, get_token, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )  # fmt: skip

    if not hub_reachable():
        raise _offline(model.name)
    try:
        info = HfApi().model_info(model.name, revision=model.revision, timeout=20)
        names = {item.rfilename for item in info.siblings or []}
        patterns = only or (WANTED if any(name.endswith(".safetensors") for name in names) else [*WANTED, "*.bin"])
        # By the branch's name, not the commit's: only then does the cache remember which commit the branch is, for offline use.
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=patterns, ignore_patterns=UNWANTED))
    except GatedRepoError as error:
        raise _gated(model.name) from error
    except RevisionNotFoundError as error:
        raise DataError(f"the model has no revision `{model.revision}`", place=model.name) from error
    except RepositoryNotFoundError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403) and get_token():
            raise _gated(model.name) from error
        raise DataError(
            "the hub has no such model, or it is private",
            place=model.name,
            hint=f"check the name at {_page(model.name)}; for a private or gated model set HF_TOKEN (huggingface.co/settings/tokens)",
        ) from error
    except HFValidationError as error:
        raise DataError(f"is neither a folder nor a hub id: {error}", place=model.name) from error
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) in (401, 403):
            raise _gated(model.name) from error
        raise DataError(f"the hub answered: {first_line(error)}", place=model.name, hint="try again later") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise _offline(model.name) from error


def _page(name: str) -> str:
    return f"https://huggingface.co/{name}"


def _gated(name: str) -> DataError:
    from huggingface_hub import get_token

    token = "the token that is set has no access to it" if get_token() else "no token is set"
    return DataError(
        f"the model is gated, and {token}",
        place=name,
        hint=f"accept its licence at {_page(name)}, then set HF_TOKEN to a token from https://huggingface.co/settings/tokens",
    )


def _offline(name: str) -> DataError:
    return DataError(
        "no such folder, and the hub cannot be reached",
        place=name,
        hint="check the network; or set `model.name` to a folder, or HF_HOME to a cache that holds the model",
    )


def _checked(folder: Path, place: str) -> Path:
    """Returns `folder`. Raises `DataError` where it holds no whole model."""
    check_folder(folder, place)
    return folder


def describe(name: str, folder: Path, source: str, revision: str | None) -> ResolvedModel:
    """Returns what a run keeps of the model in `folder`: where it is, and checksums of all that matters."""
    weights = weight_files(folder)
    sizes = "\n".join(f"{path.name} {path.stat().st_size}" for path in weights)
    described = [file_sha256(path) for path in (folder / "config.json", *sorted(folder.glob("*.index.json"))) if path.is_file()]
    described += weights_sha256(weights)  # sizes alone would not tell two tunings of one model apart
    tokenizer = "\n".join(f"{n} {file_sha256(folder / n)}" for n in TOKENIZER_FILES if (folder / n).is_file())
    return ResolvedModel(
        name=name,
        path=str(folder.resolve()),
        source=source,
        revision=revision,
        fingerprint=text_sha256("\n".join([revision or "", sizes, *described])),
        tokenizer_fingerprint=text_sha256(tokenizer),
    )
