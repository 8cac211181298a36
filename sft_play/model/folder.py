"""Whether a folder holds a whole model: config, every weight file to its last byte, and a tokenizer. Reads headers only."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.errors import CheckpointError, DataError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
LFS_POINTER = b"version https://git-lfs"
HEADER_LIMIT = 100 * 2**20
"""The safetensors format allows no longer header."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files in a fixed order: safetensors where there are any, else pickles."""
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def check_folder(folder: Path, place: str) -> None:
    """Raises `DataError` (its place is `place`: the folder, or the hub id) when the model cannot be loaded from `folder`."""
    _check_config(folder, place)
    _check_weights(folder, place)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise DataError("the model has no tokenizer", place=place, hint="it needs `tokenizer.json`")


def check_trained(folder: Path) -> None:
    """Raises `CheckpointError` for a weight file of a run's model or adapter that is cut short or no safetensors file."""
    for path in sorted(folder.glob("*.safetensors")):
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
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", place=str(path)) from None
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
    for index in sorted(folder.glob(f"*{kind}.index.json")):
        wanted = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing:
            shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise DataError(f"{len(missing)} of {len(wanted)} weight files are missing: {shown}", place=place)
    for path in files:
        problem = _damage(path)
        if problem:
            raise DataError(problem[0], place=str(path), hint=problem[1])


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
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "is not a safetensors file", "fetch it again"
    wanted = 8 + length + max(ends, default=0)
    return (f"is cut short: {size:,} of {wanted:,} bytes", "fetch it again") if size < wanted else None
