"""What a request may ask for: each parameter of OpenAI's API is honoured or refused by name; `docs/use.md` has the
table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

LARGEST = 2**63 - 1
Check = Callable[[Any], Any]
"""Returns a parameter's value as it is used. Raises `ValueError` with what is expected."""


class Refused(Exception):
    """A request that is not answered, as OpenAI's API words it."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def number(low: float, high: float, kind: Any = int | float) -> Check:
    """Take a number, or with `kind` an integer, of a range."""
    name = "an integer" if kind is int else "a number"

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise ValueError(f"{name} from {low}{f' to {high}' if high < LARGEST else ''}")
        return value

    return check


def only(*values: Any) -> Check:
    """Take what changes nothing here, and refuse what would."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise ValueError(
                " or ".join(f"`{allowed}`".replace("True", "true").replace("False", "false") for allowed in values)
            )
        return value

    return check


def of_type(kind: type, name: str) -> Check:
    """Take one kind of value."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(name)
        return value

    return check


def functions(key: str | None) -> Check:
    """Take tools that are functions, described under a key of each or in it."""
    form = '{"type": "function", "function": {"name": "..."}}' if key else '{"type": "function", "name": "..."}'

    def check(value: Any) -> Any:
        tools = value if isinstance(value, list) else [value]
        for tool in tools:
            function = tool.get(key) if key and isinstance(tool, dict) else tool
            named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if not named or tool.get("type") != "function":
                raise ValueError(f"a list of `{form}`")
        return tools

    return check


def anything(value: Any) -> Any:
    """Accept parameters that identify the client and do not change the answer."""
    return value


BOOLEAN = of_type(bool, "true or false")
MOST_ANSWERS = 16
MOST_STOPS = 16


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"a text, or a list of up to {MOST_STOPS}")
    return tuple(stops)


def _bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): number(-100, 100)(bias) for token, bias in dict(value).items()}
    except (TypeError, ValueError):
        raise ValueError("an object of token numbers with numbers from -100 to 100") from None


def _format(value: Any) -> dict[str, Any] | None:
    """Return the JSON schema that `response_format` (`text.format`) asks for; `None` for free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = value.get("json_schema", value).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise ValueError("`text`, `json_object`, or `json_schema` with a `schema`")
    return schema


def _text(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise ValueError("an object with `format`")
    if value.get("verbosity") not in (None, "medium"):
        raise ValueError("no other `verbosity` than `medium`")
    return _format(value["format"]) if value.get("format") else None


def _stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() - {"include_usage", "include_obfuscation"}:
        raise ValueError("an object with `include_usage`")
    return bool(value.get("include_usage"))


def _effort(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() - {"effort", "summary"} or value.get("summary"):
        raise ValueError("an object with `effort`")
    return value.get("effort")


TEMPLATE_VARIABLES = frozenset(
    {"enable_thinking", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget"}
)
"""What a request may tell the chat template."""
LONGEST_TEMPLATE_VALUE = 64


def _template_variables(value: Any) -> dict[str, Any]:
    """Take short values of known names: a request that brings a template would run it, forever and in C."""
    short = isinstance(value, dict) and all(
        item is None or (isinstance(item, bool | int | float | str) and len(str(item)) <= LONGEST_TEMPLATE_VALUE)
        for item in value.values()
    )
    if not short or value.keys() - TEMPLATE_VARIABLES:
        raise ValueError(f"{', '.join(sorted(TEMPLATE_VARIABLES))}, each a short text, number or true")
    return dict(value)


SAMPLING: dict[str, Check] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": number(0, LARGEST, int),
    "seed": number(-(2**63), LARGEST, int),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": _bias,
    "stop": _stops,
}
ALL: dict[str, Check] = {
    "model": of_type(str, "the name of the model"),
    "stream": BOOLEAN,
    "store": only(False),
    "service_tier": only("auto", "default"),
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), anything),
}
CHATTING: dict[str, Check] = {
    "tool_choice": only("auto", "none"),
    "parallel_tool_calls": only(True),
    "chat_template_kwargs": _template_variables,
}
SEVERAL: dict[str, Check] = {"n": number(1, MOST_ANSWERS, int), "stream_options": _stream_options}
ENDPOINTS: dict[str, dict[str, Check]] = {
    "/v1/chat/completions": ALL
    | SAMPLING
    | CHATTING
    | SEVERAL
    | {
        "messages": of_type(list, "a list of messages"),
        "tools": functions("function"),
        "max_tokens": number(1, LARGEST, int),
        "max_completion_tokens": number(1, LARGEST, int),
        "logprobs": BOOLEAN,
        "top_logprobs": number(0, 20, int),
        "response_format": _format,
        "reasoning_effort": of_type(str, "a text"),
        "verbosity": only("medium"),
        "modalities": only(["text"]),
    },
    "/v1/completions": ALL
    | SAMPLING
    | SEVERAL
    | {
        "prompt": anything,
        "max_tokens": number(1, LARGEST, int),
        "logprobs": number(0, 5, int),
        "best_of": only(1),
        "echo": only(False),
        "suffix": only(""),
    },
    "/v1/responses": ALL
    | CHATTING
    | {
        **{name: SAMPLING[name] for name in ("temperature", "top_p")},
        "input": anything,
        "tools": functions(None),
        "instructions": of_type(str, "a text"),
        "max_output_tokens": number(1, LARGEST, int),
        "text": _text,
        "reasoning": _effort,
        "truncation": only("disabled"),
        "background": only(False),
        "include": only([]),
        "top_logprobs": only(0),
    },
}
"""Path -> the parameters that its requests may have."""


def read_parameters(path: str, body: Any) -> dict[str, Any]:
    """Return the parameters of a request that are not null. Raise `Refused` for the first that is not taken."""
    if not isinstance(body, dict):
        raise Refused("the request's body is not a JSON object")
    checks, parameters = ENDPOINTS[path], {}
    for name, value in body.items():
        if name not in checks:
            close = get_close_matches(name, checks, n=1, cutoff=0.8)
            nearest = f"; did you mean `{close[0]}`?" if close else ""
            message = f"`{name}` is not a parameter of `{path}` here{nearest}"
            raise Refused(message, param=name, code="unknown_parameter")
        if value is not None:
            try:
                parameters[name] = checks[name](value)
            except ValueError as error:
                raise Refused(f"`{name}` is `{_short(value)}`; expected {error}", param=name) from None
    if len({parameters[name] for name in ("max_tokens", "max_completion_tokens") if name in parameters}) > 1:
        raise Refused("`max_tokens` and `max_completion_tokens` differ; give one of them", param="max_tokens")
    return parameters


def require(parameters: Mapping[str, Any], name: str) -> Any:
    """Return a parameter that a request must have."""
    if name not in parameters:
        raise Refused(f"`{name}` is missing", param=name, code="missing_required_parameter")
    return parameters[name]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}\N{HORIZONTAL ELLIPSIS}"
