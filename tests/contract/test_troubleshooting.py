"""docs/troubleshooting.md quotes what the program says: each message is compared where a test produces it."""

from __future__ import annotations

import re

from tests.documents import ROOT, sections_of_troubleshooting

SYMPTOMS = {
    "nccl-timeout", "connect-call-failed", "hangs-after-initialized", "cuda-out-of-memory", "one-gpu-slower-than-the-others",
    "process-group-not-initialized", "gpu-utilization-low", "loss-is-nan", "no-space-left", "401-403-or-a-gated-model",
    "expected-scalar-type", "checkpoint-of-another-backend", "address-already-in-use", "different-versions-on-machines",
    "slow-training-over-ethernet",
}  # fmt: skip


def sources(folder: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def test_every_quoted_message_is_compared_by_a_test_that_produces_it() -> None:
    quoted = {anchor for anchor, text in sections_of_troubleshooting().items() if text}
    assert set(sections_of_troubleshooting()) == SYMPTOMS and len(quoted) == len(SYMPTOMS) - 1
    assert quoted == set(re.findall(r'on_page\("([a-z0-9-]+)"', sources("tests")))


def test_messages_name_sections_that_exist() -> None:
    named = set(re.findall(r"docs/troubleshooting\.md#([a-z0-9-]+)", sources("sft_play")))
    assert named and named <= SYMPTOMS
