"""Manifests for tests: what `make kubernetes` writes for a small configuration, as plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.schedulers.kubernetes import Rendered, render

TWO = ("CONFIG=configs/l40s_pair.yaml", "HARDWARE=L40S", "NUM_NODES=2")
KINDS = ("pytorchjob", "trainjob", "job")


def rendered(*words: str) -> Rendered:
    """Return the rendering of a command line, two pods with an L40S by default."""
    names = {word.partition("=")[0] for word in words}
    return render(
        parse_call(["kubernetes", *(word for word in TWO if word.partition("=")[0] not in names), *words], COMMANDS)
    )


def documents_of(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the documents of all files, read by PyYAML as kubectl's reader would (YAML 1.1)."""
    return [document for text in texts.values() for document in yaml.safe_load_all(text)]


def documents(*words: str) -> list[dict[str, Any]]:
    """Return the documents of a command line."""
    return documents_of(rendered(*words).files)


def of_kind(documents: Sequence[Mapping[str, Any]], kind: str) -> Any:
    """Return the one document of a kind."""
    [match] = [document for document in documents if document["kind"] == kind]
    return match


def pods(documents: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the pod templates, Master or rank 0 first."""
    out = []
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "PyTorchJob":
            out += [replica["template"] for _, replica in sorted(spec["pytorchReplicaSpecs"].items())]
        elif document["kind"] == "Job":
            out.append(spec["template"])
        elif document["kind"] == "TrainingRuntime":
            out.append(spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
    return out
