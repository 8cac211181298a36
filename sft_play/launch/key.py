"""The secret of a run over several machines: who does not know it does not join. How it is made, where it comes from, how it is proved.

`train-cluster` makes one for each start and sends it over SSH, a Slurm script makes one for its job, pods take it from a Secret; manually it is
`MASTER_KEY` in the environment of every node. It stands in no file and on no command line, and is never sent: HMAC-SHA256 of random words of
both sides shows that it is known.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping

from sft_play.errors import UserError

VARIABLE = "MASTER_KEY"
LEAST = 16
"""Characters that a key must have: a shorter one is guessed."""
MAKE_ONE = f"export {VARIABLE}=$(openssl rand -hex 32), and the same value on every node"


def new_word() -> str:
    """Returns a random word: a key, or what the other side must prove its key with."""
    return secrets.token_hex(32)


def key_here(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the key of the environment, `None` when there is none. Raises `UserError` for a weak one."""
    key = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if key and len(key) < LEAST:
        raise UserError(f"`{VARIABLE}` has {len(key)} characters; expected at least {LEAST}", place="environment", hint=MAKE_ONE)
    return key or None


def proof(key: str, *said: object) -> str:
    """Returns the HMAC-SHA256 of what both sides know, in hexadecimal digits."""
    return hmac.new(key.encode(errors="surrogateescape"), json.dumps(said).encode(), "sha256").hexdigest()


def proves(key: str, given: object, *said: object) -> bool:
    """Whether a peer's proof was made with the key."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof(key, *said).encode())
