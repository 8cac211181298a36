"""Who is let in: addresses, tokens, hosts, pages of other sites; and TensorBoard stays on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from sft_play.access import TOKEN_VARIABLE, Guard, Message, address_of, is_loopback
from tests.conftest import Program

TOKEN = "a-token-of-26-letters-here"


@pytest.mark.parametrize(
    ("typed", "address", "own"),
    [
        (None, "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("[::1]", "::1", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("::", "::", False),
    ],
)
def test_addresses_are_parsed_and_loopback_is_recognised(typed: str | None, address: str, own: bool) -> None:
    assert address_of(typed) == address
    assert is_loopback(address) is own


def answer(guard: Guard, *headers: tuple[str, str], kind: str = "http", path: str = "/") -> int:
    """Return the guard's status, or 200 if the request reached the application."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Message = {
        "type": kind,
        "path": path,
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    }
    never: Any = None
    asyncio.run(guard(scope, never, send))
    return int(sent[0].get("status", sent[0].get("code")))


application: Any = PlainTextResponse("secret")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", f"Bearer {TOKEN}")], 200),
        ([], 401),
        ([("Authorization", f"Basic {TOKEN}")], 401),
        ([("Authorization", f"Bearer {TOKEN[:-1]}")], 401),
        ([("Authorization", "Bearer \xff\xfe")], 401),
        ([("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {TOKEN}")], 401),
        ([("Host", "elsewhere.example"), ("Authorization", f"Bearer {TOKEN}")], 200),
    ],
)
def test_with_a_token_only_the_token_lets_in(headers: list[tuple[str, str]], status: int) -> None:
    guard = Guard(application, token=TOKEN, address="0.0.0.0")
    assert answer(guard, *headers) == status
    assert answer(guard, *headers, kind="websocket") == (200 if status == 200 else 1008)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Host", "[::1]:8000")], 200),
        ([("Host", "127.0.0.2:1")], 200),
        ([], 403),
        ([("Host", "attacker.example:8000")], 403),
        ([("Host", "127.0.0.1.attacker.example")], 403),
        ([("Host", "[::1")], 403),
        ([("Host", "127.0.0.1"), ("Host", "attacker.example")], 403),
        ([("Host", "localhost"), ("Origin", "http://localhost:3000")], 200),
        ([("Host", "localhost"), ("Origin", "https://attacker.example")], 403),
        ([("Host", "localhost"), ("Origin", "null")], 403),
    ],
)
def test_without_a_token_a_request_names_this_machine_and_comes_from_it(
    headers: list[tuple[str, str]], status: int
) -> None:
    assert answer(Guard(application, token=None, address="127.0.0.2"), *headers) == status


def test_serve_refuses_an_open_address_without_a_token(in_process: Program) -> None:
    for token, message in (
        ("", "openssl rand"),
        ("tooshort", "at least 16"),
        ("with a blank in the middle", "without spaces"),
    ):
        done = in_process("serve", "RUN=gone", "HOST=0.0.0.0", env={TOKEN_VARIABLE: token})
        assert (
            done.code == 2 and TOKEN_VARIABLE in done.err and message in done.err and (token or "none") not in done.err
        )
    assert "there is no run" in in_process("serve", "RUN=gone", "HOST=0.0.0.0", env={TOKEN_VARIABLE: TOKEN}).err
    assert in_process("serve", "RUN=gone", env={TOKEN_VARIABLE: "tooshort"}).code == 2, (
        "one that is set is always asked for"
    )


def test_tensorboard_stays_on_this_machine(in_process: Program) -> None:
    for words, message in (
        ("TENSORBOARD_PORT=70000", "expected a port, 1 to 65535"),
        ("HOST=0.0.0.0 TENSORBOARD_PORT=7007", "`tensorboard` takes no `HOST`"),
    ):
        in_process("tensorboard", *words.split()).refused(2, message)


@pytest.mark.parametrize(
    ("typed", "key", "message"),
    [
        ("MASTER_KEY=typed-for-all-to-see", "", "come from the environment"),
        ("", "short-one", "`MASTER_KEY` has 9 characters; "),
    ],
)
def test_a_runs_key_is_neither_typed_nor_weak_nor_repeated(
    typed: str, key: str, message: str, in_process: Program, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_KEY", key)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    node = ("NUM_NODES=2", "RUN_NAME=keyed", "NODE_RANK=1", "MASTER_ADDR=127.0.0.1", "NUM_GPUS=1")
    own = (f"MODEL_NAME={tiny}", f"DATA_TRAIN_PATH={tmp_path}/d.jsonl")
    done = in_process("train-distributed", "CONFIG=quickstart", *node, *own, *filter(None, [typed]))
    done.refused(2, "`MASTER_KEY`", message)
    assert "for-all-to-see" not in done.err and "short-one" not in done.err
