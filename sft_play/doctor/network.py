"""Checks of ports, the hub and access to gated models."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from sft_play.doctor.finding import Check, Context, Finding
from sft_play.errors import HUB_LOGIN
from sft_play.plan.hub import is_offline

HUB_SECONDS = 4.0
GATED = ("meta-llama/", "google/gemma", "mistralai/", "black-forest-labs/")
"""Owners and names on the hub whose models ask for a licence to be accepted."""
PORTS = {
    29500: (
        "port-29500",
        "multi-node runs meet there",
        "one machine takes a free port by itself; several nodes: MASTER_PORT=29501",
    ),
    6006: ("port-6006", "TensorBoard's usual port", "nothing to do: the next free port is taken; or set TENSORBOARD_PORT"),
}


def ports(_: Context) -> Iterator[Finding]:
    """Ports that another process has."""
    for port, (finding_id, use, remedy) in PORTS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                text = f"port {port} is taken ({use})"
                yield Finding(id=finding_id, severity="note", text=text, remedy=remedy)


def hub(_: Context) -> Iterator[Finding]:
    """Whether models and data can be downloaded."""
    if is_offline():
        text = "HF_HUB_OFFLINE is set: only models and data on this machine are used"
        yield Finding(id="hub-offline", severity="note", text=text, remedy="unset HF_HUB_OFFLINE to download")
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(endpoint, timeout=HUB_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding(
            id="hub-unreachable",
            severity="warning",
            text=f"{endpoint} cannot be reached: {reason}",
            remedy="check the network and HTTPS_PROXY; local folders work, and so does the quickstart if pip reaches its index",
        )


def token(context: Context) -> Iterator[Finding]:
    """A gated model without a token."""
    name = context.model_name
    if not name or not name.startswith(GATED) or Path(name).exists():
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    if not os.environ.get("HF_TOKEN") and not file.is_file():
        yield Finding(
            id="token-missing",
            severity="warning",
            text=f"`{name}` is gated, and no hub token is set",
            remedy=f"accept the licence on https://huggingface.co/{name}, then set HF_TOKEN or run {HUB_LOGIN}",
        )


CHECKS: tuple[Check, ...] = (ports, hub, token)
