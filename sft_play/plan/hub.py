"""Whether the hub answers, asked before its library is: that would try six times and say so each time."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

REACH_SECONDS = 4.0
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
"""What sets the offline mode of the hub's libraries; the first one is the user's to set too."""


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` says that only what is on this machine is used."""
    return os.environ.get(OFFLINE[0], "").lower() in ("1", "true", "yes", "on")


def hub_reachable() -> bool:
    """Whether the hub answers within a few seconds; `HF_HUB_OFFLINE` means no."""
    if is_offline():
        return False
    proxied = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(proxied or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=REACH_SECONDS):
            return True
    except (OSError, UnicodeError):
        return False


def offline_unless_reachable() -> bool:
    """Whether the hub answers; where it does not, its libraries are set to their offline mode.

    They would retry for half a minute; offline they take what is cached, or say at once what is missing. They read their variables
    when they are imported, so this comes before.
    """
    reached = hub_reachable()
    if not reached:
        os.environ |= dict.fromkeys(OFFLINE, "1")
    return reached
