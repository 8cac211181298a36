"""Model families by how they write thoughts and calls: tokenizers with short versions of the published templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sft_play.data.formats import Message
from tests.chat_tokenizers import save_tokenizer

QWEN3_5 = """
{%- macro words(text) -%}{{- text.split('</think>')[-1].strip() -}}{%- endmacro -%}
{%- macro within(text) -%}{{- text.split('</think>')[0].split('<think>')[-1] if '</think>' in text -}}{%- endmacro -%}
{%- macro thought(m) -%}{{- (m.reasoning_content or within(m.content)).strip() -}}{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' -}}
{%- endif -%}
{%- set last = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
    {{- '<|im_start|>' + ('user\n<tool_response>\n' if m.role == 'tool' else m.role + '\n') -}}
    {%- if m.role == 'assistant' -%}
        {%- if loop.index0 > last.question -%}{{- '<think>\n' + thought(m) + '\n</think>\n\n' -}}{%- endif -%}
        {{- words(m.content) -}}
        {%- for call in m.tool_calls or [] -%}
            {{- '\n\n' if loop.first and words(m.content) else '\n' if not loop.first -}}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
            {%- for key, value in call.function.arguments | items -%}
                {{- '<parameter=' + key + '>\n' -}}
                {{- (value | string if value is string or value is number else value | tojson) + '\n</parameter>\n' -}}
            {%- endfor -%}
            {{- '</function>\n</tool_call>' -}}
        {%- endfor -%}
    {%- else -%}{{- m.content + ('\n</tool_response>' if m.role == 'tool' else '') -}}{%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""
GPT_OSS = """
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') -}}
{{- '\n\nReasoning: medium<|end|>' -}}
{%- if messages[0].role in ['developer', 'system'] -%}
    {%- set told = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set told = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- if told or tools -%}
    {{- '<|start|>developer<|message|>' + told -}}
    {%- for tool in tools or [] -%}
        {{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = () => any;\n' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for m in turns -%}
    {%- if m.role == 'assistant' -%}
        {%- if 'tool_calls' in m -%}
            {%- set later = namespace(answer=false) -%}
            {%- for other in turns[loop.index:] -%}
                {%- if other.role == 'assistant' and 'tool_calls' not in other -%}
                    {%- set later.answer = true -%}
                {%- endif -%}
            {%- endfor -%}
            {%- if m.content and m.thinking -%}
                {{- raise_exception('Cannot pass both content and thinking with tool calls') -}}
            {%- endif -%}
            {%- if (m.content or m.thinking) and not later.answer -%}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' -}}
            {%- endif -%}
            {%- set call = m.tool_calls[0].function -%}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
            {{- call.arguments | tojson + '<|call|>' -}}
            {%- set called.name = call.name -%}
        {%- elif loop.last and not add_generation_prompt -%}
            {%- if 'thinking' in m -%}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
            {%- endif -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
        {%- endif -%}
    {%- elif m.role == 'tool' -%}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' -}}
        {{- m.content | tojson + '<|end|>' -}}
    {%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
LLAMA_3_1 = """
{{- bos_token -}}
{%- if not date_string is defined -%}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' -}}
{%- if messages[0].role == 'system' -%}
    {{- messages[0].content | trim -}}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for m in messages -%}
    {%- if 'tool_calls' in m -%}
        {%- if m.tool_calls | length != 1 -%}
            {{- raise_exception('This model only supports single tool-calls at once!') -}}
        {%- endif -%}
        {%- set call = m.tool_calls[0].function -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' -}}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' -}}
    {%- else -%}
        {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' -}}
        {%- if tools and loop.first -%}
            {%- for tool in tools -%}{{- tool | tojson + '\n\n' -}}{%- endfor -%}
        {%- endif -%}
        {{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""
MISTRAL = """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}
        {%- if tools and loop.last or tools and not loop.nextitem.role == 'user' and loop.index0 == 0 -%}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST] ' + m.content + '[/INST]' -}}
    {%- elif m.tool_calls is defined -%}
        {{- '[TOOL_CALLS] [' -}}
        {%- for call in m.tool_calls -%}
            {%- if call.id is not defined or call.id | length != 9 -%}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}
            {%- endif -%}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif m.role == 'assistant' -%}{{- ' ' + m.content | trim + eos_token -}}
    {%- elif m.role == 'tool' -%}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson -}}
        {{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
    {%- else -%}{{- raise_exception('Only user and assistant roles are supported!') -}}{%- endif -%}
{%- endfor -%}"""


class ChatFamily(NamedTuple):
    """A tokenizer as a family publishes it."""

    model: str
    """Of `tests.families`."""
    special: list[str]
    eos: str
    template: str | None = None
    """The family's template; `None` if it is `named`."""
    named: str | None = None
    """`data.chat_template`."""
    thoughts: bool = True
    tools: bool = True


R1 = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]
CHAT_FAMILIES = {
    "qwen3": ChatFamily("qwen3", ["<|im_start|>"], "<|im_end|>", named="qwen3"),
    "qwen3_5": ChatFamily("qwen3_5_text", ["<|im_start|>"], "<|im_end|>", QWEN3_5),
    "gpt_oss": ChatFamily(
        "gpt_oss", ["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>"], "<|return|>", GPT_OSS
    ),
    "deepseek_r1": ChatFamily("qwen2", R1, "<\uff5cend\u2581of\u2581sentence\uff5c>", named="deepseek_r1", tools=False),
    "llama3_1": ChatFamily(
        "llama", ["<|start_header_id|>", "<|end_header_id|>"], "<|eot_id|>", LLAMA_3_1, thoughts=False
    ),
    "mistral": ChatFamily(
        "mistral",
        [
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ],
        "</s>",
        MISTRAL,
        thoughts=False,
    ),
}


def save_family(folder: Path, name: str) -> Path:
    """Write a family's tokenizer."""
    family = CHAT_FAMILIES[name]
    return save_tokenizer(folder, "llama3", special=family.special, bos="<s>", eos=family.eos, template=family.template)


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def call(*, ident: str = "abcdefghi", **arguments: Any) -> dict[str, Any]:
    """Return a call of `add`."""
    return {"id": ident, "type": "function", "function": {"name": "add", "arguments": arguments}}


def asked(question: str, **answer: Any) -> list[Message]:
    """Return a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "", **answer}]
