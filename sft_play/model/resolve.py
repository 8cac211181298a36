"""Find the base model (a folder, a hub snapshot, or the embedded model without a hub), and check it.

A model must be complete, and its own Python code must be trusted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sft_play.config.schema import ModelConfig
from sft_play.errors import CheckpointError, DataError
from sft_play.files import file_sha256, make_once, read_json, read_object, text_sha256
from sft_play.model.convert import embedded_folder, expand, is_embedded
from sft_play.plan.architecture import hub_reachable, hub_refusal, is_expanded, local_folder, quantization_of
from sft_play.runs.adapters import KEEP_CHAT, check_adapter, made_folder
from sft_play.runs.checkpoints import weight_files as safetensors_of
from sft_play.runs.folder import cache_folder, may_run, require_plain
from sft_play.runs.manifest import blob_of, digests_of
from sft_play.runs.prepared import ParentAdapter, ResolvedModel
from sft_play.runs.stamp import MADE, own_stamp

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
"""Files of a hub repository that are downloaded; `.bin` weights only if there are no safetensors."""
UNWANTED = ["original/*", "consolidated*", "onnx/*", "gguf/*"]  # copies of the same weights for other programs
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
    """Return the model, downloaded if necessary. Raise `DataError` with a hint."""
    if (folder := local_folder(model.name)) is not None:
        check_folder(folder, model.name)
        if folder.name.startswith(f"{MADE}-") and folder == made_folder(folder.name):
            return describe_made(folder)
        return describe(model.name, _trainable(folder), "folder", None)
    snapshot, complete = _cached(model), False
    with contextlib.suppress(DataError):  # after an interrupted download the rest is downloaded
        if snapshot is not None:
            check_folder(snapshot, model.name)
            complete = True
    if snapshot is None or not complete:
        if is_embedded(model.name) and not hub_reachable():
            return describe(model.name, embedded_folder(), "embedded", None)
        snapshot = _download(model)
        check_folder(snapshot, model.name)
    return describe(model.name, _trainable(snapshot), "hub", snapshot.name)


def small_files(name: str, revision: str | None, what: str = "model") -> Path:
    """Return a folder with the config and tokenizer of a folder or hub id, without weights. Raise `DataError`."""
    model = ModelConfig(name=name, revision=revision)
    folder = local_folder(name, what) or _cached(model)
    if folder is None and is_embedded(name) and not hub_reachable():
        return embedded_folder()
    return folder or _download(model, ["config.json", *TOKENIZER_FILES])


def _trainable(folder: Path) -> Path:
    """Return the folder, or, for weights in MXFP4 or FP8, a cached copy in bfloat16, created on first use."""
    if not is_expanded(read_json(folder / "config.json")):
        return folder
    files = weight_files(folder)
    settings = [file_sha256(path) for path in sorted(folder.glob("*config.json"))]
    source_sha256 = text_sha256("\n".join([*weights_sha256(files), *tokenizer_sha256(folder), *settings]))
    return make_once(
        cache_folder() / "models" / f"bfloat16-{source_sha256[:24]}-2",
        "config.json",
        lambda target: expand(folder, files, target),
    )


def _cached(model: ModelConfig) -> Path | None:
    """Return the snapshot that earlier runs downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except (FileNotFoundError, ValueError):  # not in the cache, or not a repository name
        return None


def _download(model: ModelConfig, only: list[str] | None = None) -> Path:
    """Download a model, or `only` the files of these patterns. Raise `DataError`."""
    from huggingface_hub import HfApi, snapshot_download

    if not hub_reachable():
        raise hub_refusal(model)
    try:
        info = HfApi().model_info(model.name, revision=model.revision, timeout=20)
        names = {item.rfilename for item in info.siblings or []}
        patterns = only or (WANTED if any(name.endswith(".safetensors") for name in names) else [*WANTED, "*.bin"])
        # By the branch's name, not the commit's: only then does the cache remember the branch's commit for offline use.
        return Path(
            snapshot_download(model.name, revision=model.revision, allow_patterns=patterns, ignore_patterns=UNWANTED)
        )
    except Exception as error:
        raise hub_refusal(model, error) from error


def describe(name: str, folder: Path, source: str, revision: str | None) -> ResolvedModel:
    """Return the record of the model in `folder`: its place, and checksums of everything that matters."""
    weights = weight_files(folder)
    sizes = "\n".join(f"{path.name} {path.stat().st_size}" for path in weights)
    described = [
        file_sha256(path) for path in (folder / "config.json", *sorted(folder.glob("*.index.json"))) if path.is_file()
    ]
    described += weights_sha256(weights)  # sizes alone would not distinguish two tunings of a model
    return ResolvedModel(
        name=name,
        path=str(folder.resolve()),
        source=source,
        revision=revision,
        fingerprint=text_sha256("\n".join([revision or "", sizes, *described])),
        tokenizer_fingerprint=text_sha256("\n".join(tokenizer_sha256(folder))),
    )


def describe_made(folder: Path) -> ResolvedModel:
    """Return the record of a base that a preparation made: it is known by what it was made of, which names it."""
    return replace(describe(str(folder), folder, MADE, None), fingerprint=folder.name.rpartition("-")[2])


def tokenizer_sha256(folder: Path) -> list[str]:
    """Return the names and checksums of a tokenizer's files."""
    return [f"{name} {file_sha256(folder / name)}" for name in TOKENIZER_FILES if (folder / name).is_file()]


# Whether a folder contains a complete model: config, every weight file to its last byte, and a tokenizer.


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
LFS_POINTER = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a fixed order: safetensors if there are any, else pickles."""
    return safetensors_of(folder) or sorted(folder.glob("pytorch_model*.bin"))


def check_folder(folder: Path, place: str) -> None:
    """Raise `DataError` if the model cannot be loaded from `folder`; `place` in the message is a folder or hub id."""
    require_plain(folder)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise DataError("this is an adapter, not a model", place=place, hint="set `model.name` to the base model")
        hint = "a model folder contains config.json, weights and a tokenizer"
        raise DataError("the model has no `config.json`", place=place, hint=hint)
    refuse_embedded_adapter(folder, place)
    config = folder / "config.json"
    if "model_type" not in read_object(config, follow=True):
        raise DataError("is not JSON or has no `model_type`, so transformers cannot load it", place=str(config))
    _check_weights(folder, place)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise DataError("the model has no tokenizer", place=place, hint="it needs `tokenizer.json`")


def quantization_in(folder: Path) -> str:
    """Return how the weights in a model folder are quantised, as in `ModelShape.quantization`; empty for plain ones."""
    return quantization_of(read_json(folder / "config.json"))


def check_trained(folder: Path, *, ours: bool = True) -> None:
    """Raise `CheckpointError` for trained weights that are damaged or unsafe: a run's, or with `ours=False` an adapter
    that may come from the hub.

    Refused are weight files that are truncated or not safetensors, an index that names files in other folders, and
    entries that are not plain files of this folder.
    """
    check_adapter(folder / "adapter_config.json", ours=ours)
    try:
        require_plain(folder)
        _indexed_files(folder)
        _check_files(weight_files(folder))
    except DataError as error:
        hint = "CHECKPOINT=last takes the last checkpoint instead"
        raise CheckpointError(error.message, place=error.place, hint=hint if ours else error.hint) from None


def refuse_other_base(parent: ParentAdapter, base: ResolvedModel) -> None:
    """Raise `CheckpointError` if an adapter belongs to another base model than `base`, by its stamp."""
    if stamp := own_stamp(Path(parent.path)):
        adapter = f"the adapter `{parent.name}` was trained"
        for problem, then, now, hint in (
            (
                f"{adapter} over `{stamp.base_model}`, not `{base.name}`",
                stamp.base_fingerprint,
                base.fingerprint,
                "omit `model.name` and `data.new_tokens` to use the adapter's own base",
            ),
            (
                f"{adapter} with another tokenizer or chat template than that of `{base.name}`",
                stamp.tokenizer_fingerprint,
                base.tokenizer_fingerprint,
                KEEP_CHAT,
            ),
        ):
            if then != now:
                raise CheckpointError(problem, place=parent.path, hint=hint)


def _tensors(path: Path) -> dict[str, Any]:
    """Return name -> tensor, not read yet, of a safetensors file; nothing for a pickle."""
    if path.suffix != ".safetensors":
        return {}
    file: Any = safe_open(path, framework="np")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def refuse_embedded_adapter(folder: Path, place: str) -> None:
    """Raise `DataError` for a model folder that contains an adapter.

    transformers would load both, and not report which weights are missing.
    """
    if (folder / "adapter_config.json").is_file():
        raise DataError(
            "this model folder contains an adapter too (`adapter_config.json`)",
            place=place,
            hint="merge the adapter into the model first, or move `adapter_config.json` and its weights away",
        )


def _check_weights(folder: Path, place: str) -> None:
    files, indexed = weight_files(folder), _indexed_files(folder)
    if not files:
        hint = "it needs `model.safetensors` (or shards with an index); GGUF files cannot be trained"
        raise DataError("the model has no weights", place=place, hint=hint)
    expected = {name for name in indexed if name.endswith(files[0].suffix)}
    missing = sorted(name for name in expected if not (folder / name).is_file())
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"{len(missing)} of {len(expected)} weight files are missing: {shown}", place=place)
    _check_files(files)


def _indexed_files(folder: Path) -> set[str]:
    """Return the weight files that the folder's indexes name. Raise `DataError` for a bad index, or another folder."""
    names_in_folder: set[str] = set()
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError("is not an index of weight files", place=str(index), hint="fetch it again") from None
        for name in names:
            if Path(str(name)).name != name or name == ".." or "\\" in name:
                raise DataError(f"names `{name}`, which is not in the folder", place=str(index))
        names_in_folder |= names
    return names_in_folder


def _check_files(paths: Sequence[Path]) -> None:
    """Raise `DataError` for a file without weights or a truncated one: a safetensors header states the exact size."""
    for path in paths:
        with path.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise DataError(
                    "is a Git LFS pointer, not the weights", place=str(path), hint="run `git lfs pull` in that folder"
                )
        try:
            if path.suffix == ".safetensors":
                safe_open(path, framework="np")
        except SafetensorError as error:
            raise DataError(
                f"is cut short, or is not a safetensors file: {error}", place=str(path), hint="fetch it again"
            ) from None


def count_numbers(folder: Path, *, four_bit: bool = False) -> int:
    """Return how many numbers a folder's safetensors files hold; with `four_bit`, two per packed byte."""
    parts = [part for path in weight_files(folder) for part in _tensors(path).values()]
    return sum(math.prod(part.get_shape()) * (2 if four_bit and part.get_dtype() == "U8" else 1) for part in parts)


# A model's own code.


def is_about_trust(error: BaseException) -> bool:
    """Return whether transformers refused a folder because its code would have to run."""
    return "trust_remote_code" in str(error)


def code_not_trusted(what: str, place: str) -> DataError:
    """Return the refusal of a model or tokenizer (`what`) that needs its own code."""
    return DataError(
        f"the {what} comes with its own Python code (`auto_map`), without which it cannot be loaded; it is not run"
        " without your consent",
        place=place,
        hint=(
            "read that code, then set `model.trust_remote_code: true` and, for a model of the hub, `model.revision` to"
            " the full commit that you have read; if a run's configuration sets them already, add"
            " MODEL_TRUST_REMOTE_CODE=true to the command"
        ),
    )


def refuse_untrusted_code(folder: Path, place: str) -> None:
    """Raise `DataError` for a model that only its own code can load (`auto_map`, and no class of transformers).

    It is called if `model.trust_remote_code` is false, before anything is launched. `load_tokenizer` refuses the
    tokenizer's code.
    """
    mapped = set(_auto_map(folder / "config.json"))
    if not mapped & {"AutoConfig", "AutoModelForCausalLM"}:
        return
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(read_json(folder / "config.json").get("model_type"))
    in_transformers = kind in CONFIG_MAPPING
    if not in_transformers or (
        "AutoModelForCausalLM" in mapped and CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise code_not_trusted("model", place)


def runs_code(folder: Path) -> bool:
    """Return whether a folder with `model.trust_remote_code` has code, and the user consented to run it.

    Raise `DataError` for code of another repository.
    """
    if not any(folder.rglob("*.py")) or not may_run("model"):
        return False
    refuse_foreign_code(folder)
    return True


def refuse_foreign_code(folder: Path) -> None:
    """Raise `DataError` for a model whose `auto_map` names code of another repository, which no revision pins.

    It is called only if `model.trust_remote_code` is true; otherwise no code of a model runs.
    """
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        for entry in _auto_map(path).values():
            for name in entry if isinstance(entry, (list, tuple)) else [entry]:
                if isinstance(name, str) and "--" in name:
                    raise DataError(
                        f"`auto_map` names code of another repository, `{name}`, which no commit pins",
                        place=str(path),
                        hint="copy the model and that code into a folder, read it, and set `model.name` to the folder",
                    )


def _auto_map(path: Path) -> dict[str, Any]:
    """Return the classes of the model's own code that a file names."""
    named = read_object(path, follow=True).get("auto_map") or {}
    return named if isinstance(named, dict) else {"": named}


def weights_sha256(paths: Sequence[Path]) -> list[str]:
    """Return each file's checksum: its blob's name in the hub's cache, else its sha256. Raise `OSError`."""
    blobs = {path: blob_of(path) for path in paths}
    own = [path for path, blob in blobs.items() if blob is None]
    digests = dict(zip(own, digests_of(own, "weights"), strict=True))
    return [blob or digests[path] for path, blob in blobs.items()]
