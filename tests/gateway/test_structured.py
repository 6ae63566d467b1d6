"""Goal: what a request says of its answer's form becomes the right grammar, prompt and parser, in each dialect.

Method: random walks through the grammars, which the dialect's parser must read, and a validator must find valid; chat
templates of each family in small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Trained

from pyengine.chat.conversation import ChatMessage, templated
from pyengine.chat.errors import Unservable
from pyengine.chat.parsing import CallPiece, Content, Reasoning
from pyengine.chat.structured import Form, form_of
from pyengine.chat.tools import dialect_of
from pyengine.chat.tools.hermes import HERMES
from pyengine.chat.tools.llama3 import LLAMA3
from pyengine.chat.tools.mistral import MISTRAL
from pyengine.gateway.errors import ApiError
from pyengine.gateway.openai import parse_chat, parse_completion
from pyengine.grammar import Grammars, source
from pyengine.scheduler.types import Grammar
from pyengine.text import Detokenizer, Tokenizer
from tests.worker.schemas import SCHEMAS

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "東京"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "note": {"type": "string", "maxLength": 4}},
    "required": ["a", "note"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS = {"weather": CITY, "add": ADD, "now": {"type": "object", "maxProperties": 0}}

SHOWN = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
CLOSED, OPENED = "<think>\n\n</think>\n\n", "<think>\n"
MAY_THINK = f"{{% if enable_thinking is defined %}}{CLOSED}{{% elif open %}}{OPENED}{{% endif %}}"
TEMPLATES = {
    "hermes": f"{SHOWN}<tool_call>{SAID}",
    "mistral": f"{SHOWN}[TOOL_CALLS]{SAID}",
    "llama3": f"{SHOWN}<|python_tag|>{SAID}",
    "none": SAID,
    "thinks": f"{SHOWN}<tool_call>{SAID}{MAY_THINK}",
}
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"]


def tokenizer(folder: Path, template: str, special: bool) -> Tokenizer:
    """Bytes, an end, and the marks as tokens of their own: special, or plain text."""
    alphabet = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    trained = Trained(models.BPE(vocab=alphabet, merges=[]))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    trained.add_special_tokens(["<end>"])
    trained.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    folder.mkdir(exist_ok=True, parents=True)
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def models_(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Tokenizer, Grammars]]:
    made = {}
    for name, template in TEMPLATES.items():
        for special in (False, True):
            one = tokenizer(tmp_path_factory.mktemp(f"{name}{special}"), template, special)
            made[name, special] = (one, Grammars(one, one.vocab_size, one.eos_token_ids))
    return made


def asked(prompt: str = "x", options: dict[str, Any] | None = None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": prompt}], **fields}
    return parse_chat(json.dumps(body | ({"chat_template_kwargs": options} if options else {})).encode())[0]


def formed(request: Any, tokenizer_: Tokenizer) -> Form:
    messages, options = templated(
        request.messages, request.wanted.shown, request.chat_template_kwargs, tokenizer_.template
    )
    return form_of(request.wanted, tokenizer_, tokenizer_.chat(messages, options))


def walk(form: Form, tokenizer_: Tokenizer, grammars: Grammars, seed: int, most: int = 600) -> tuple[list[int], str]:
    """An answer at random, which ends where it may with one chance in four; its tokens, its text as it is parsed."""
    assert form.grammar is not None
    random = np.random.default_rng(seed)
    matcher = grammars.matcher(form.grammar)
    ids: list[int] = []
    while len(ids) < most:
        grammars.fill([matcher])
        assert matcher.mask is not None and matcher.flaw is None, matcher.flaw
        may = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in may if token in tokenizer_.eos_token_ids]
        others = [token for token in may if token not in ends]
        if ends and (not others or random.random() < 0.25):
            break
        marks = [token for token in others if token >= 256]
        ids.append(int(random.choice(marks if marks and random.random() < 0.3 else others)))
        matcher.accept(ids[-1:])
    else:
        raise AssertionError("it has not ended")
    text = Detokenizer(tokenizer_, keep=form.keep)
    return ids, text.push(ids) + text.finish()


def read(form: Form, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content, calls."""
    parser = form.parser()
    deltas = parser.push(text)
    deltas += parser.finish("stop")[0]
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallPiece):
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.call][1] += delta.arguments
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    return thought, content, [(name, json.loads(arguments)) for name, arguments in calls]


Models = dict[tuple[str, bool], tuple[Tokenizer, Grammars]]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.booleans(),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([None, "weather", "add", "now"]),
)
def test_calls_that_must_be_are_read_and_valid(
    models_: Models, name: str, special: bool, seed: int, parallel: bool, named: str | None
) -> None:
    choice: Any = "required" if named is None else {"type": "function", "function": {"name": named}}
    request = asked(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    one, grammars = models_[name, special]
    form = formed(request, one)
    _, text = walk(form, one, grammars, seed, most=6000)
    _, content, calls = read(form, text)
    assert not content
    assert calls and (len(calls) == 1 or (parallel and named is None))
    for called, arguments in calls:
        assert named in (None, called)
        assert jsonschema_rs.is_valid(PARAMETERS[called], arguments)


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.sampled_from([False, True]), st.integers(0, 2**31), st.sampled_from(["open", "may", "must not"]))
def test_reasoning_comes_before_the_form(
    models_: Models, schema: dict[str, Any], special: bool, seed: int, thinks: str
) -> None:
    one, grammars = models_["thinks", special]
    options = {"open": {"open": True}, "may": {}, "must not": {"enable_thinking": False}}[thinks]
    form_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    form = formed(asked(options=options, response_format=form_), one)
    assert (form.reasons, form.thinking) == (thinks != "must not", thinks == "open")
    _, text = walk(form, one, grammars, seed, most=20_000)
    _, content, calls = read(form, text)
    assert jsonschema_rs.is_valid(schema, json.loads(content))
    assert not calls
    assert (THOUGHT in text) <= (thinks != "must not")
    assert (THOUGHT in text) >= (thinks == "open")


THOUGHT = "</think>"


def test_a_form_beside_tools_leaves_both_open(models_: Models) -> None:
    one, grammars = models_["hermes", False]
    form = formed(asked(tools=TOOLS, structured_outputs={"choice": ["yes", "no"]}), one)
    seen = set()
    for seed in range(40):
        _, content, calls = read(form, walk(form, one, grammars, seed, most=6000)[1])
        assert bool(calls) != (content in ("yes", "no"))
        seen.add(bool(calls))
    assert seen == {False, True}


FORMS: dict[str, tuple[dict[str, Any], Grammar]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    "regex": ({"structured_outputs": {"regex": "[a/]+"}}, Grammar("regex", "[a/]+")),
    "choice": ({"structured_outputs": {"choice": ["a", "ü"]}}, Grammar("choice", '["a", "ü"]')),
    "lark": ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    "json text": ({"structured_outputs": {"json": '{"type": "null"}'}}, Grammar("json_schema", '{"type": "null"}')),
    "object": ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
}


@pytest.mark.parametrize("name", FORMS)
def test_fields_become_grammars(name: str, models_: Models) -> None:
    fields, grammar = FORMS[name]
    one, grammars = models_["none", False]
    request, unknown = parse_completion(json.dumps({"prompt": "x", **fields}).encode())
    assert (form_of(request.wanted, one, None), unknown) == (Form(grammar=grammar), [])
    assert formed(asked(**fields), one).grammar == grammar
    # Behind reasoning it is the same.
    thinker, follower = models_["thinks", True]
    form = formed(asked(options={"open": True}, **fields), thinker)
    thought, content, _ = read(form, walk(form, thinker, follower, 1, most=20_000)[1])
    matcher = grammars.matcher(grammar)
    matcher.accept(one.encode(content))
    assert matcher.complete, (thought, content, matcher.flaw)


def test_gbnf_is_read_as_well() -> None:
    grammar = asked(structured_outputs={"grammar": 'root ::= "a" [0-9]+'}).wanted.grammar()
    assert grammar is not None and grammar.kind == "lark" and "start:" in grammar.text
    source(grammar)


def test_strict_refuses_what_lenient_ignores(models_: Models) -> None:
    schema = {"type": "string", "format": "unheard-of"}
    _, grammars = models_["none", False]
    for strict in (True, None, False):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        future = grammars.prepare(asked(response_format=form).wanted.grammar())
        if strict is False:
            future.result()
        else:
            with pytest.raises(ValueError, match="unheard-of"):
                future.result()
    # What a client tells llguidance by the schema itself is not heard.
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"x-guidance": {"lenient": True}}}}
    with pytest.raises(ValueError, match="unheard-of"):
        grammars.prepare(asked(response_format=form).wanted.grammar()).result()


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "schema is required"),
    "no type": ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    "none": ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    "both": ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "structured_outputs", "exactly one"),
    "old": ({"guided_json": {}}, "guided_json", "send structured_outputs.json"),
    "older": ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    "no grammar": ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "neither Lark nor GBNF"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "no such tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        "tool_choice",
        "one of: weather, add, now",
    ),
    "no such choice": ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "perhaps"),
    "twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "one name"),
    "no name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    "call and form": (
        {"tools": TOOLS, "tool_choice": "required", "response_format": SCHEMA},
        "response_format",
        "must be a call",
    ),
    "no end": ({"ignore_eos": True, "response_format": SCHEMA}, "ignore_eos", "has an end"),
    "cut arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}]},
        "messages",
        "messages[0].tool_calls[0].function.arguments: must be a JSON object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_contradicts_itself_is_refused_by_name(name: str) -> None:
    fields, param, says = BAD[name]
    with pytest.raises(ApiError) as error:
        asked(**fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert says in error.value.message


# --- dialects and prompts ---------------------------------------------------------------------------------------------


def test_the_dialect_is_the_templates() -> None:
    found = [dialect_of(TEMPLATES[name]) for name in ("hermes", "mistral", "llama3", "none")]
    assert found == [
        HERMES,
        MISTRAL,
        LLAMA3,
        HERMES,
    ]
    meta = '<|start_header_id|>{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'
    assert dialect_of(meta) is LLAMA3
    assert dialect_of("{% if tools %}<tool_call><function=x>{% endif %}") is None, "XML between the marks"


def test_a_model_whose_calls_nobody_reads_gets_none(models_: Models, tmp_path: Path) -> None:
    one = tokenizer(tmp_path, "{% if tools %}<function=x>{% endif %}{{ messages[0].content }}", special=False)
    with pytest.raises(Unservable, match="does not read"):
        formed(asked(tools=TOOLS), one)
    assert formed(asked(tools=TOOLS, tool_choice="none"), one).plain


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "7 °C"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
]  # fmt: skip


def prompted(template: str, choice: str = "auto", messages: Sequence[dict[str, Any]] = CONVERSATION) -> tuple[Any, Any]:
    request = asked(messages=list(messages), tools=TOOLS, tool_choice=choice)
    return templated(request.messages, request.wanted.shown, None, template)


def test_templates_that_know_tools_get_them_as_data() -> None:
    messages, options = prompted(TEMPLATES["hermes"])
    assert [tool["function"]["name"] for tool in options["tools"]] == ["weather", "add", "now"]
    assert options["tools"][0] == TOOLS[0], "and nothing that the client did not say"
    assert messages[2]["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
        {"type": "function", "id": "c2", "function": {"name": "now", "arguments": {}}},
    ]
    assert messages[3] == {"role": "tool", "content": "7 °C", "tool_call_id": "c1"}
    assert "tools" not in prompted(TEMPLATES["hermes"], "none")[1]


def test_to_others_they_are_told_in_words() -> None:
    """In the dialect that is then looked for: what the model has called before is read again as it was."""
    messages, options = prompted(TEMPLATES["none"])
    assert options == {}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.")
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in messages[0]["content"]
    calls = read(Form(dialect=HERMES), messages[2]["content"])[2]
    assert calls == [("weather", {"city": "Zürich"}), ("now", {})]
    assert messages[3]["content"].count("<tool_response>") == 2
    assert all(set(message) == {"role", "content"} for message in messages)
    plain, _ = prompted(TEMPLATES["none"], messages=[{"role": "user", "content": "Hi"}])
    assert [message["role"] for message in plain] == ["system", "user"]
    without = templated([ChatMessage("user", "Hi")], [], None, TEMPLATES["none"])
    assert without == ([{"role": "user", "content": "Hi"}], {})


def test_a_template_for_tools_is_used_for_tools(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    tokenizer(tmp_path / "x", "", special=False)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}<tool_call>"},
    ]
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": named}))
    one = Tokenizer.load(tmp_path / "x")
    user = [{"role": "user", "content": "x"}]
    assert one.decode(one.chat(user)) == "plain"
    assert one.decode(one.chat(user, {"tools": TOOLS})).startswith("weather")
    assert dialect_of(one.template) is HERMES


def test_special_marks_are_kept_only_where_somebody_reads_them(models_: Models) -> None:
    one, _ = models_["mistral", True]
    plain, tools = formed(asked(), one), formed(asked(tools=TOOLS), one)
    assert (plain.plain, plain.keep) == (True, {})
    mark = one.mark("[TOOL_CALLS]")
    assert mark is not None and tools.keep == {mark: "[TOOL_CALLS]"}
    ids = [*"ü".encode()[:1], mark, *b"x"]
    assert Detokenizer(one, keep=tools.keep).push([0, mark]).endswith("[TOOL_CALLS]")
    assert msgspec.structs.asdict(tools)["dialect"] is MISTRAL
    assert "[TOOL_CALLS]" not in Detokenizer(one).push(ids)
