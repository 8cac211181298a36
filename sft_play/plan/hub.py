"""Whether the hub answers, asked before its library is: that would try six times and say so each time."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

REACH_SECONDS = 4.0


def hub_reachable() -> bool:
    """Whether the hub answers within a few seconds; `HF_HUB_OFFLINE` means no."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    proxied = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(proxied or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=REACH_SECONDS):
            return True
    except (OSError, UnicodeError):
        return False
