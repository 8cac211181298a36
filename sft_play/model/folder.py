"""Whether a folder holds a complete model: config, every weight file to its last byte with its checksum, and a tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_play.errors import CheckpointError, DataError
from sft_play.files import file_sha256, read_json, text_sha256, write_json
from sft_play.runs.consent import may_run
from sft_play.runs.folder import cache_folder, require_plain
from sft_play.runs.manifest import is_state_file

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "adapter_config.json")
LFS_POINTER = b"version https://git-lfs"
HEADER_LIMIT = 100 * 2**20
"""The safetensors format allows no longer header."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files in a fixed order: safetensors where there are any, else pickles."""
    found = (sorted(path for path in folder.glob(pattern) if not is_state_file(path.name)) for pattern in WEIGHTS)
    return next((files for files in found if files), [])


def check_folder(folder: Path, place: str) -> None:
    """Raises `DataError` (its place is `place`: the folder, or the hub id) when the model cannot be loaded from `folder`."""
    require_plain(folder)
    _check_config(folder, place)
    _check_weights(folder, place)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise DataError("the model has no tokenizer", place=place, hint="it needs `tokenizer.json`")


def check_trained(folder: Path) -> None:
    """Raises `CheckpointError` for a weight file of a run's model or adapter that is cut short or no safetensors file, for an
    index that names files elsewhere, and for files that are no plain files of this folder."""
    try:
        require_plain(folder)
    except DataError as error:
        raise CheckpointError(error.message, place=error.place, hint=error.hint) from None
    for index in sorted(folder.glob("*.index.json")):
        if (outside := _outside(_indexed(index))) is not None:
            raise CheckpointError(f"names `{outside}`, which is not in the folder", place=str(index))
    for path in sorted(path for path in folder.glob("*.safetensors") if not is_state_file(path.name)):
        problem = _damage(path)
        if problem:
            raise CheckpointError(problem[0], place=str(path), hint="CHECKPOINT=last takes the last checkpoint instead")


def _check_config(folder: Path, place: str) -> None:
    path = folder / "config.json"
    if not path.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise DataError(
            "this is an adapter, not a model" if adapter else "the model has no `config.json`",
            place=place,
            hint="set `model.name` to the base model" if adapter else "a model folder holds config.json, weights and a tokenizer",
        )
    refuse_embedded_adapter(folder, place)
    parsed = {}
    for one in (
        path,
        *(folder / name for name in SETTINGS),
    ):  # transformers reads them all, and ends in a traceback where one is no JSON
        try:
            parsed[one.name] = read_json(one) if one.is_file() else None
        except ValueError as error:
            raise DataError(f"is not JSON: {error}", place=str(one)) from None
    config = parsed[path.name]
    if not isinstance(config, dict) or "model_type" not in config:
        raise DataError("names no `model_type`, so transformers cannot load it", place=str(path))


def _check_weights(folder: Path, place: str) -> None:
    files = weight_files(folder)
    if not files:
        gguf = next(folder.glob("*.gguf"), None)
        if gguf:
            message = f"the model has no weights that can be trained: `{gguf.name}` is a GGUF file"
            raise DataError(message, place=place, hint="take the model that the GGUF file was made from")
        hint = "it needs `model.safetensors` (or shards with an index)"
        raise DataError("the model has no weights", place=place, hint=hint)
    kind = files[0].suffix
    for index in sorted(folder.glob("*.index.json")):
        if (outside := _outside(_indexed(index))) is not None:
            raise DataError(f"names `{outside}`, which is not in the folder", place=str(index))
    for index in sorted(folder.glob(f"*{kind}.index.json")):
        wanted = _indexed(index)
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing:
            shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise DataError(f"{len(missing)} of {len(wanted)} weight files are missing: {shown}", place=place)
    for path in files:
        problem = _damage(path)
        if problem:
            raise DataError(problem[0], place=str(path), hint=problem[1])


def _indexed(index: Path) -> set[str]:
    """Returns the weight files that an index names. Raises `DataError` for what is no index."""
    try:
        named = set(read_json(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        named = {None}
    if not all(isinstance(name, str) for name in named):
        raise DataError("is not an index of weight files", place=str(index), hint="fetch it again")
    return named


def _outside(names: set[str]) -> str | None:
    """Returns a name that leads out of the folder, or into another one; weight files lie beside their index."""
    return next((name for name in sorted(names) if Path(name).name != name or name in ("", ".", "..") or "\\" in name), None)


def refuse_embedded_adapter(folder: Path, place: str) -> None:
    """Raises `DataError` for a model folder with an adapter in it: transformers would load both, and not say which weights are missing."""
    if (folder / "adapter_config.json").is_file():
        raise DataError(
            "this model folder holds an adapter too (`adapter_config.json`)", place=place,
            hint="merge the adapter into the model first, or move `adapter_config.json` and its weights away",
        )  # fmt: skip


def refuse_untrusted_code(folder: Path, place: str) -> None:
    """Raises `DataError` for a model that only code of its own folder can load (`auto_map`, and no class of transformers).

    Asked where `model.trust_remote_code` is false, before anything is launched. The tokenizer's code: `model.tokenizer.load_tokenizer`.
    """
    try:
        config = read_json(folder / "config.json")
        mapped, kind = set(config.get("auto_map") or ()), str(config.get("model_type"))
    except (OSError, ValueError, AttributeError, TypeError):
        return  # `check_folder` says so
    if not mapped & {"AutoConfig", "AutoModelForCausalLM"}:
        return
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    known = kind in CONFIG_MAPPING
    if not known or ("AutoModelForCausalLM" in mapped and CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING):
        raise code_not_trusted("model", place)


def is_about_trust(error: BaseException) -> bool:
    """Whether transformers refuses because a folder's code would have to run."""
    return "trust_remote_code" in str(error)


def code_not_trusted(what: str, place: str) -> DataError:
    """Returns the refusal of a model or tokenizer (`what`) that needs code of its own."""
    return DataError(
        f"the {what} comes with Python code of its own (`auto_map`), without which it cannot be loaded, and which is not run unasked",
        place=place,
        hint="read that code; to let it run, set `model.trust_remote_code: true`, and for a model of the hub `model.revision` to the full"
        " commit that you have read; where a run's configuration has set it, type MODEL_TRUST_REMOTE_CODE=true with the command;"
        " code in a run's folder is never run: copy it elsewhere first",
    )


def runs_code(folder: Path) -> bool:
    """Whether the code of a model's folder is run where `model.trust_remote_code` is true: it has some, and the user consented to that.

    Raises `DataError` for code of another repository.
    """
    if not any(folder.rglob("*.py")) or not may_run(folder, "model"):
        return False
    refuse_foreign_code(folder)
    return True


def refuse_foreign_code(folder: Path) -> None:
    """Raises `DataError` for a model whose `auto_map` names code of another repository, which `model.revision` does not pin.

    Asked only where `model.trust_remote_code` is true; elsewhere no code of a model is run.
    """
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        try:
            named = read_json(path).get("auto_map") or {}
        except (OSError, ValueError, AttributeError):
            continue
        entries = named.values() if isinstance(named, dict) else [named]
        for entry in entries:
            for name in entry if isinstance(entry, (list, tuple)) else [entry]:
                if isinstance(name, str) and "--" in name:
                    raise DataError(
                        f"`auto_map` names code of another repository, `{name}`, which no commit pins", place=str(path),
                        hint="copy the model into a folder with that code in it, read it, and set `model.name` to the folder",
                    )  # fmt: skip


def _damage(path: Path) -> tuple[str, str] | None:
    """Returns what is wrong with a weight file, and what to do. A safetensors header tells the file's size exactly."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return "is a Git LFS pointer, not the weights", "run `git lfs pull` in that folder"
        if path.suffix != ".safetensors":
            return None
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            return "is not a safetensors file, or only the beginning of one", "fetch it again"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return "is not a safetensors file", "fetch it again"
    wanted = 8 + length + max(ends, default=0)
    return (f"is cut short: {size:,} of {wanted:,} bytes", "fetch it again") if size < wanted else None


# Checksums of weight files, whole but read once: a file that has not changed since costs one `stat`.


BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""What the hub's cache calls a file: the sha256 of its content, or git's sha1 of a small one."""
WORTH_SAYING_BYTES = 4 * 2**30
THREADS = 8


def weights_sha256(paths: Sequence[Path]) -> list[str]:
    """Returns a checksum over all bytes of each file: from the hub's cache its blob's name, else the sha256 of its content.

    A sha256 is kept in `cache/digests/`, together with the file's size, times and inode, and is taken from there until one of
    them changes. Raises `OSError` for a file that cannot be read; a cache that cannot be written only costs the time again.
    """
    unread = sum(path.stat().st_size for path in paths if _blob_name(path) is None and _kept(path) is None)
    if unread > WORTH_SAYING_BYTES and os.environ.get("RANK", "0") == "0":
        print(f"reading {unread / 2**30:.0f} GiB of weights for their checksums, this once", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing leaves Python's lock
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    known = _blob_name(path) or _kept(path)
    if known is not None:
        return known
    before = _facts(path)
    digest = file_sha256(path)
    if _facts(path) == before:  # else somebody writes to it right now, and the next start looks again
        with contextlib.suppress(OSError):
            write_json(_record(path), before | {"sha256": digest})
    return digest


def _blob_name(path: Path) -> str | None:
    """Returns the checksum that the hub's cache has for a file, whose snapshots are links into `blobs/`."""
    target = path.resolve()
    return target.name if path.is_symlink() and target.parent.name == "blobs" and BLOB.fullmatch(target.name) else None


def _kept(path: Path) -> str | None:
    """Returns the sha256 that was found earlier, if the file is the same."""
    try:
        record = read_json(_record(path))
        digest = record.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return str(digest) if record == _facts(path) else None


def _record(path: Path) -> Path:
    return cache_folder() / "digests" / f"{text_sha256(str(path.resolve()))}.json"


def _facts(path: Path) -> dict[str, str | int]:
    """What changes with a file. The change time, too: a copy may keep the modification time, but not that."""
    found = path.stat()
    return {
        "path": str(path.resolve()),
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }
