"""`make serve` as clients use it: OpenAI's own client, raw requests, several at once, and signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from sft_play.launch.environment import free_port
from sft_play.serve.parameters import ENDPOINTS
from tests.documents import ROOT
from tests.places import WORDS, Place
from tests.tiny_models import build_tiny_llama

ANSWER = "It is a part of the language."
QUESTION = [{"role": "user", "content": "What is a list 1?"}]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["label", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("serve"))
    model = build_tiny_llama(place.folder / "model")
    rows = [{"prompt": f"What is a {word} 1?", "completion": ANSWER} for word in WORDS]
    (place.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 128}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {place.folder}/data.jsonl}}\n"
        "train: {max_steps: 60, global_batch_size: 12, learning_rate: 0.02, generation_max_new_tokens: 40}\n"
    )
    place.train("demo")
    return place


@contextlib.contextmanager
def served(place: Place, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Yield a server and its status."""
    log = place.folder / "serve.log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            place.command("serve", *words, "JSON=1"),
            env=place.environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert server.stdout
        facts = json.loads(server.stdout.readline() or "{}")
        assert facts, log.read_text()
        yield server, facts
    finally:
        server.kill()
        server.communicate(timeout=240)


@pytest.fixture(scope="module")
def url(place: Place) -> Iterator[str]:
    with served(place, "RUN=demo", f"PORT={free_port()}") as (_, facts):
        yield facts["url"]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240)


@pytest.fixture(scope="module")
def chat(client: openai.OpenAI) -> Callable[..., Any]:
    """Return a function that asks the question with further parameters."""
    return lambda **options: client.chat.completions.create(**({"model": "demo", "messages": QUESTION} | options))


@pytest.fixture(scope="module")
def answer(place: Place) -> str:
    """Return the answer of `make infer`."""
    return place.call("infer", "RUN=demo", f"PROMPT={QUESTION[0]['content']}").out.removesuffix("\n")


def test_an_answer_is_that_of_infer_under_the_asked_name(client: openai.OpenAI, chat: Any, answer: str) -> None:
    assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"
    completion = chat(temperature=0, max_tokens=40)
    assert answer and completion.choices[0].message.content == answer and completion.model == "demo"
    assert completion.choices[0].finish_reason == "stop" and completion.usage.completion_tokens > 2
    assert chat(max_tokens=2).choices[0].finish_reason == "length"
    streamed = list(chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices) == answer
    assert streamed[-1].usage == completion.usage and streamed[-2].choices[0].finish_reason == "stop"
    response = client.responses.create(model="demo", input=QUESTION[0]["content"])
    assert (response.output_text, response.status, response.model) == (answer, "completed", "demo")
    with client.responses.stream(model="demo", input=QUESTION) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer
        assert events.get_final_response().output_text == answer


def test_sampling_follows_the_request(chat: Any, answer: str) -> None:
    def texts(**options: Any) -> list[str]:
        return [choice.message.content for choice in chat(max_tokens=12, **options).choices]

    wild = texts(n=4, temperature=2.0, seed=3)
    assert len({*wild, answer}) == 5 and wild == texts(n=4, temperature=2.0, seed=3) != texts(
        n=4, temperature=2, seed=9
    )
    assert texts(temperature=2.0, top_p=0.0001, seed=1) == texts(temperature=2.0, extra_body={"top_k": 1}) == texts()
    first = chat(max_tokens=1, logprobs=True, top_logprobs=3).choices[0].logprobs.content[0]
    likely = [top.logprob for top in first.top_logprobs]
    assert likely == sorted(likely, reverse=True) and first.logprob == likely[0] <= 0
    assert first.token == first.top_logprobs[0].token and bytes(first.bytes).decode() == first.token
    assert texts(logit_bias={"300": 100}, frequency_penalty=0) != [answer]
    repeated = chat(max_tokens=12, logit_bias={"300": 60}).choices[0].message.content
    assert chat(max_tokens=12, logit_bias={"300": 60}, frequency_penalty=2).choices[0].message.content == repeated
    assert len(set(texts(logit_bias={"300": 5}, presence_penalty=2)[0])) > 1


def test_a_stop_is_not_part_of_the_answer(chat: Any, answer: str) -> None:
    stop = answer[len(answer) // 2 :][:3]
    before = answer.partition(stop)[0]
    choice = chat(max_tokens=40, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (before, "stop")
    streamed = chat(max_tokens=40, stop=["never written", stop], stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in streamed) == before


def test_an_answer_keeps_to_a_json_schema(client: openai.OpenAI, chat: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA, "strict": True}}
    for sampling in ({}, {"temperature": 2.0, "seed": 1}):
        choice = chat(response_format=form, max_tokens=300, **sampling).choices[0]
        review = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and review["label"] in ("good", "bad") and review["count"] <= 9
    free = chat(response_format={"type": "json_object"}).choices[0]
    # Nothing makes an untrained model close a text of any length before it has no room for more.
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict)
    assert free.message.content.lstrip().startswith("{")
    form = {"format": {"type": "json_schema", "name": "review", "schema": SCHEMA}}
    assert json.loads(client.responses.create(model="demo", input="a", text=form).output_text).keys() == {
        "label",
        "count",
    }


def test_plain_completions_take_several_prompts(client: openai.OpenAI) -> None:
    completions = client.completions.create(model="demo", prompt=["The", "A list", "What"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in completions.choices] == [0, 1, 2] and completions.usage.completion_tokens == 12
    assert "".join(completions.choices[1].logprobs.tokens) == completions.choices[1].text
    alone = client.completions.create(model="demo", prompt="A list", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in alone) == completions.choices[1].text


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"max_tokens": 0}, "`max_tokens` is `0`; expected an integer from 1", "max_tokens"),
        ({"max_tokens": "8"}, '`max_tokens` is `"8"`; expected an integer from 1', "max_tokens"),
        ({"tools": [{"name": "f"}]}, 'expected a list of `{"type": "function", "function": ', "tools"),
        ({"tools": "f"}, 'expected a list of `{"type": "function", "function": ', "tools"),
        ({"messages": []}, "`messages` is empty", "messages"),
        ({"messages": [{"role": "user"}]}, "lacks `role` or `content`", "messages"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "A"}]}, "not continued", "messages"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "the model takes at most 511", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text", "messages"),
        ({"model": "another"}, "there is one model here: `demo`", "model"),
        ({"temperature": 2.1}, "expected a number from 0 to 2", "temperature"),
        ({"n": 17}, "expected an integer from 1 to 16", "n"),
        ({"store": True}, "expected `false`", "store"),
        ({"tool_choice": "required"}, "expected `auto` or `none`", "tool_choice"),
        ({"response_format": {"type": "xml"}}, "`json_schema` with a `schema`", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
            "cannot be followed",
            "response_format",
        ),
        (
            {"tools": [{"type": "function", "function": TOOL}]},
            "of `tools`; train with a template that writes calls: `data.chat_template: qwen3`",
            "messages",
        ),
        ({"reasoning_effort": "low"}, "does not read `reasoning_effort`", "reasoning_effort"),
        ({"extra_body": {"best": 1}}, "`best` is not a parameter", "best"),
        ({"extra_body": {"max_token": 5}}, "did you mean `max_tokens`?", "max_token"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{% if 7**(9**10) > 3 %}x{% endif %}"}}},
            "enable_thinking",
            "chat_template_kwargs",
        ),
        ({"extra_body": {"chat_template_kwargs": {"thinking": [1]}}}, "enable_thinking", "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": "x"}}, "enable_thinking", "chat_template_kwargs"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    chat: Any, options: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(**options)
    body = caught.value.body
    assert isinstance(body, dict) and message in body["message"] and body["param"] == param, body
    assert caught.value.status_code == (404 if param == "model" else 400)


def test_the_table_names_every_parameter() -> None:
    table = (ROOT / "docs" / "use.md").read_text(encoding="utf-8").partition("| parameter |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert documented == {name for checks in ENDPOINTS.values() for name in checks}


NEVER = {"2": -100}
"""Forbids the end of a turn, so that every answer has `max_tokens`."""


def answered_together(chat: Any) -> list[str]:
    """Return the answers to six requests that are made at once."""
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = chat(messages=ASKED[index], max_tokens=150, logit_bias=NEVER).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [answers[index] for index in range(6)]


ASKED = [[{"role": "user", "content": f"What is a {'list ' * n}{n}?"}] for n in range(1, 7)]


def test_requests_are_answered_together_and_each_as_alone(chat: Any) -> None:
    alone = [chat(messages=asked, max_tokens=150, logit_bias=NEVER).choices[0].message.content for asked in ASKED]
    assert answered_together(chat) == alone


@pytest.mark.quiet
def test_six_requests_take_less_time_than_four_of_them_in_turn(chat: Any) -> None:
    answered_together(chat)
    began = time.monotonic()
    chat(messages=ASKED[0], max_tokens=150, logit_bias=NEVER)
    single = time.monotonic() - began
    began = time.monotonic()
    answered_together(chat)
    assert time.monotonic() - began < 4 * single


def ask(url: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=240) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/chat/completions", b"{", 400),
        ("/chat/completions", b"[1]", 400),
        ("/chat/completions", b"{}", 400),
        ("/completions", b'{"model": "demo", "prompt": [99999]}', 400),
        ("/responses", b'{"model": "demo", "input": 5}', 400),
        ("/responses", b'{"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}', 400),
        ("/embeddings", b"{}", 404),
        ("/chat/completions", None, 405),
        ("/models/another", None, 404),
    ],
)
def test_every_error_has_openais_body(url: str, path: str, body: bytes | None, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(f"{url}{path}", body)
    error = json.load(caught.value)["error"]
    assert caught.value.code == status and error["message"] and error["type"] == "invalid_request_error"
    if path == "/embeddings":
        assert "POST /v1/embeddings is not served here; there are POST /v1/chat/completions" in error["message"]


def test_a_disconnected_client_is_not_answered(url: str, chat: Any) -> None:
    with contextlib.suppress(openai.APITimeoutError):
        chat(max_tokens=480, logit_bias={"2": -100}, timeout=0.2)
    stream = chat(max_tokens=480, logit_bias={"2": -100}, stream=True)
    next(iter(stream))
    stream.close()
    assert chat(max_tokens=2).usage.completion_tokens == 2


def test_a_second_server_takes_the_next_port_and_a_signal_ends_it(place: Place) -> None:
    port = free_port()
    with served(place, f"MODEL={place.folder / 'model'}", f"PORT={port}") as (server, facts):
        assert facts["url"] == f"http://127.0.0.1:{port}/v1"
        with served(place, "RUN=demo", "CHECKPOINT=last", f"PORT={port}") as (_, other):
            assert f"port {port} is taken; using" in (place.folder / "serve.log").read_text()
            assert other["model"] == "demo-step-000060"

        def ask_for_much() -> None:
            body = {"model": "model", "messages": QUESTION, "max_tokens": 30_000, "logit_bias": {"2": -100}}
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                ask(f"{facts['url']}/chat/completions", json.dumps(body).encode())

        long = threading.Thread(target=ask_for_much)
        long.start()
        time.sleep(1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=240) == 143
        long.join(30)
        with pytest.raises(urllib.error.URLError):
            ask(f"{facts['url']}/models")
