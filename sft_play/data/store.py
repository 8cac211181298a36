"""Prepared rows on their way to the disk: gathered in four bytes a token, written aside as Arrow, published by rename."""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.data.template import IGNORED, Encoded
from sft_play.files import read_json, sync_folder, write_json

MANIFEST = "manifest.json"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class TokenColumn:
    """Lists of tokens, one after another. Python's own lists would take ten times the memory."""

    def __init__(self) -> None:
        self.values = array("i")
        self.ends = array("i", [0])

    def append(self, tokens: Sequence[int]) -> None:
        self.values.extend(tokens)
        self.ends.append(len(self.values))

    def lengths(self) -> list[int]:
        """Returns the tokens of each row."""
        return [end - start for start, end in zip(self.ends[:-1], self.ends[1:], strict=True)]

    def arrow(self) -> Any:
        """Returns a `pyarrow.ListArray` of int32."""
        import numpy as np
        import pyarrow as pa

        return pa.ListArray.from_arrays(np.asarray(self.ends, np.int32), np.asarray(self.values, np.int32))


class RowTable:
    """The rows of one split: `input_ids`, `labels`, `row` (where it stood among those read), `prompt_ids`, `reference`."""

    def __init__(self) -> None:
        self.input_ids, self.labels, self.prompt_ids = TokenColumn(), TokenColumn(), TokenColumn()
        self.row: list[int] = []
        self.reference: list[str] = []
        self.label_tokens = 0
        """Tokens that a loss is computed for: the first one of a row follows nothing, and never is."""
        self.most_labels = 0
        """Of the row that has most."""

    def __len__(self) -> int:
        return len(self.row)

    def append(self, index: int, encoded: Encoded) -> None:
        self.input_ids.append(encoded.input_ids)
        self.labels.append(encoded.labels)
        self.prompt_ids.append(encoded.prompt_ids)
        self.row.append(index)
        self.reference.append(encoded.reference)
        labels = sum(label != IGNORED for label in encoded.labels[1:])
        self.label_tokens += labels
        self.most_labels = max(self.most_labels, labels)

    def fingerprint(self) -> str:
        """Returns a sha256 over the tokens and labels of all rows, in order."""
        digest = hashlib.sha256()
        for part in (self.input_ids.ends, self.input_ids.values, self.labels.values):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Returns the counts of `runs.prepared.PreparedSplit` that the rows themselves tell."""
        lengths = self.input_ids.lengths()
        return {
            "rows": len(lengths),
            "tokens": sum(lengths),
            "label_tokens": self.label_tokens,
            "most_labels": self.most_labels,
            "longest": max(lengths),
            "median": int(statistics.median(lengths)),
            "fingerprint": self.fingerprint(),
        }

    def quantiles(self) -> dict[str, int]:
        """Returns lengths in tokens that the given shares of rows do not exceed."""
        lengths = sorted(self.input_ids.lengths())
        return {f"{share:.0%}": lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in QUANTILES}

    def dataset(self) -> Any:
        """Returns a `datasets.Dataset`."""
        import datasets
        import pyarrow as pa

        tokens = {"input_ids": self.input_ids.arrow(), "labels": self.labels.arrow()}
        rest = {"row": pa.array(self.row, pa.int64()), "prompt_ids": self.prompt_ids.arrow()}
        return datasets.Dataset(pa.table(tokens | rest | {"reference": pa.array(self.reference, pa.string())}))


def write_split(folder: Path, rows: RowTable, manifest: Mapping[str, Any]) -> None:
    """Writes `rows` and `manifest` aside and publishes them as `folder`; of two processes that race, one publishes."""
    import datasets

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        datasets.disable_progress_bars()
        rows.dataset().save_to_disk(str(scratch))
        sizes = {path.name: path.stat().st_size for path in scratch.iterdir()}
        write_json(scratch / MANIFEST, {**manifest, "files": sizes})
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first; its rows are the same
            if not (folder / MANIFEST).is_file():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a split that is there as it was written; removes what is damaged and returns `None`."""
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
        if all((folder / name).stat().st_size == size for name, size in manifest["files"].items()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if folder.exists():
        shutil.rmtree(folder)
    return None
