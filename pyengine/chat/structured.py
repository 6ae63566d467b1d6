"""What form an answer is to have: the fields of a request that say so, the grammar that they lead to, and who reads it.

Reference: OpenAI's `response_format`, `tools`, `tool_choice`; vLLM's `structured_outputs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import llguidance.gbnf_to_lark
import msgspec
from msgspec import Meta

from pyengine.chat.errors import Unservable
from pyengine.chat.parsing import THINK, THOUGHT, AnswerParser, ReasoningCount
from pyengine.chat.tools import Dialect, Tool, dialect_of
from pyengine.grammar import LONGEST, WHITESPACE, GrammarError, choice
from pyengine.scheduler.types import Grammar
from pyengine.text import Tokenizer

#: Functions of one request (the API's limit), and calls of one answer that are asked for: no model calls for ever.
MAX_TOOLS, MAX_CALLS = 128, 16
MAX_CHOICE = 1024
_ENCODER = json.JSONEncoder(ensure_ascii=False)

#: vLLM's names of before, and where they went.
RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
}


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """strict: false: keywords that cannot be followed are ignored, else they are refused by name."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's: exactly one of the fields. grammar: Lark, or GBNF as llama.cpp writes it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(msgspec.Struct, frozen=True):
    """strict: keywords of its parameters that cannot be followed are refused; else they are ignored."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant has made, in a conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    def plain(self, at: str) -> dict[str, Any]:
        """As chat templates take it. at: where it stands. Raises Unservable for arguments that are no JSON object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            text = f"{at}.function.arguments: must be a JSON object, as text; was the answer cut by its length?"
            raise Unservable(text, param="messages")
        call: dict[str, Any] = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call | ({"id": self.id} if self.id is not None else {})


class Wanted(msgspec.Struct, frozen=True):
    """Of one request, what bears on the form of its answers."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Sequence[ToolParam] = ()
    tool_choice: ToolChoice | None = None
    parallel: bool = True

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as templates take them. Of those it must not use the model hears nothing."""
        if self.tool_choice == "none":
            return []
        return [
            {
                "type": "function",
                "function": {k: v for k, v in msgspec.structs.asdict(tool.function).items() if v is not None},
            }
            for tool in self.tools
        ]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def check(self) -> None:
        """What types cannot say. Raises Unservable."""
        if len(self.tools) > MAX_TOOLS:
            raise _refused("tools", f"{len(self.tools)} functions; send at most {MAX_TOOLS}")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise _refused("tools", "two functions have one name; send each once")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise _refused("tool_choice", "there are no tools to choose from; send tools with it")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            text = f"there is no function {self.tool_choice.function.name[:64]!r}; send one of: {', '.join(names)}"
            raise _refused("tool_choice", text)
        form = self._form()
        if form is not None and self.must_call:
            raise _refused(
                form[0], "the answer must be a call of a tool, so it has no other form; leave one of them out"
            )

    def grammar(self) -> Grammar | None:
        """That of the content. Raises Unservable."""
        form = self._form()
        return form[1] if form is not None else None

    def _form(self) -> tuple[str, Grammar] | None:
        asked, wanted = self.response_format, self.structured_outputs
        forms: list[tuple[str, Grammar]] = []
        if asked is not None and asked.type != "text":
            forms.append(("response_format", _of_format(asked)))
        if wanted is not None:
            forms += _of_structured(wanted)
            if len(forms) != 1:
                text = "send exactly one of json, regex, choice, grammar, json_object, and no other response_format"
                raise _refused("structured_outputs", text)
        return forms[0] if forms else None


class Form(msgspec.Struct, frozen=True):
    """Of the answers to one prompt. keep: special tokens whose text the parser wants to see."""

    grammar: Grammar | None = None
    dialect: Dialect | None = None
    names: frozenset[str] = frozenset()
    reasons: bool = False
    thinking: bool = False
    keep: Mapping[int, str] = {}

    @property
    def plain(self) -> bool:
        """The text is the answer, and nobody reads it."""
        return self.dialect is None and not self.reasons

    def parser(self) -> AnswerParser:
        """For one answer."""
        return AnswerParser(self.dialect, self.names, reasons=self.reasons, thinking=self.thinking)


NO_FORM = Form()


def form_of(wanted: Wanted, tokenizer: Tokenizer, prompt: Sequence[int] | None) -> Form:
    """prompt: of a chat, None for a plain completion, whose text nobody reads. Raises Unservable."""
    grammar = wanted.grammar()
    if prompt is None:
        return Form(grammar=grammar)
    reasons, thinking = _reasoning(tokenizer, prompt)
    dialect = None
    if wanted.shown:
        dialect = dialect_of(tokenizer.template)
        if dialect is None:
            text = "this model calls tools in a way that this server does not read; send tool_choice none, or no tools"
            raise _refused("tools", text)
    marks = ((THINK, THOUGHT) if reasons else ()) + (dialect.markers if dialect is not None else ())
    tokens, keep = _marked(tokenizer, marks)
    # To llguidance each added token in brackets is a special one, which no text spells.
    spelled = {mark: f"<[{token}]>" for mark, token in tokens.items()}
    thought = _thought(thinking, spelled) if reasons else ""
    if dialect is not None and (wanted.must_call or grammar is not None):
        grammar = _calls(wanted, dialect, spelled, thought, grammar)
    elif grammar is not None and thought:
        grammar = _composed(f"start: {thought} @body\n{_thoughts(spelled)}", grammar)
    names = frozenset(tool.function.name for tool in wanted.tools)
    return Form(grammar, dialect, names, reasons, thinking, keep)


def reasoning_counts(
    tokenizer: Tokenizer, form: Form, prompts: Sequence[Sequence[int]], chat: bool
) -> list[ReasoningCount]:
    """Counters for the answers to each of `prompts` (token ids), none if the model does not reason. chat: as `form`
    knows of its one prompt; a completion's text is told as it is, and its reasoning counted all the same.
    """
    if chat:
        return [ReasoningCount(tokenizer, form.keep, form.thinking) for _ in prompts] if form.reasons else []
    if not _is_reasoner(tokenizer):
        return []
    _, keep = _marked(tokenizer, (THINK, THOUGHT))
    return [ReasoningCount(tokenizer, keep, _reasoning(tokenizer, prompt)[1]) for prompt in prompts]


def _is_reasoner(tokenizer: Tokenizer) -> bool:
    return THINK in tokenizer.template or THOUGHT in tokenizer.template


def _reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[bool, bool]:
    """Whether an answer to the prompt may reason, and whether the prompt has begun that."""
    if not _is_reasoner(tokenizer):
        return False, False
    # 32 tokens: the mark and the space behind it, if each byte is one.
    end = "".join(map(tokenizer.name, prompt[-32:])).rstrip()
    # A template that has been asked not to let it think closes what it has opened.
    return not end.endswith(THOUGHT), end.endswith(THINK)


def _marked(tokenizer: Tokenizer, marks: Sequence[str]) -> tuple[dict[str, int], dict[int, str]]:
    """Tokens of the marks that are one, and of them those whose text decoding leaves out."""
    tokens = {mark: token for mark in marks if (token := tokenizer.mark(mark)) is not None}
    return tokens, {token: mark for mark, token in tokens.items() if not tokenizer.decode([token])}


# -- grammars ----------------------------------------------------------------------------------------------------------


def _of_format(asked: ResponseFormat) -> Grammar:
    if asked.type == "json_object":
        return Grammar("json_object", "")
    form = asked.json_schema
    if form is None or form.schema is None:
        raise _refused("response_format", "json_schema.schema is required for the type json_schema; send it")
    return Grammar("json_schema", _schema(form.schema, lenient=form.strict is False))


def _of_structured(wanted: StructuredOutputs) -> list[tuple[str, Grammar]]:
    where = "structured_outputs"
    forms = []
    if wanted.json is not None:
        text = wanted.json if isinstance(wanted.json, str) else _schema(wanted.json, lenient=False, where=where)
        forms.append((where, Grammar("json_schema", text)))
    if wanted.regex is not None:
        forms.append((where, Grammar("regex", wanted.regex)))
    if wanted.choice is not None:
        forms.append((where, Grammar("choice", json.dumps(wanted.choice, ensure_ascii=False))))
    if wanted.grammar is not None:
        try:
            text = llguidance.gbnf_to_lark.any_to_lark(wanted.grammar)
        except Exception as error:  # the library raises nothing more exact
            raise _refused(f"{where}", f"grammar: is neither Lark nor GBNF: {error}") from error
        forms.append((where, Grammar("lark", text)))
    if wanted.json_object:
        forms.append((where, Grammar("json_object", "")))
    return forms


def _schema(schema: dict[str, Any] | bool, *, lenient: bool, where: str = "response_format") -> str:
    """As text, with what it asks of llguidance itself replaced by what we allow. Raises Unservable."""
    options = {"whitespace_pattern": WHITESPACE} | ({"lenient": True} if lenient else {})
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": options}
    parts, size = [], 0
    try:
        # In Python, part by part: the whole at once keeps the interpreter's lock for as long as it takes.
        for part in _ENCODER.iterencode(schema):
            parts.append(part)
            size += len(part)
            if size > LONGEST:
                raise _refused(where, f"the schema has more than {LONGEST} characters; send a shorter one")
    except RecursionError as error:
        raise Unservable("the schema is nested too deeply", param=where) from error
    return "".join(parts)


def _calls(
    wanted: Wanted, dialect: Dialect, spelled: Mapping[str, str], thought: str, content: Grammar | None
) -> Grammar:
    """The answer is calls of tools; or, if it need not be, of its own form."""
    chosen = wanted.tool_choice
    named = chosen.function.name if isinstance(chosen, NamedTool) else None
    tools = [
        Tool(
            tool.function.name,
            _schema(tool.function.parameters or _NO_PARAMETERS, lenient=not tool.function.strict, where="tools"),
        )
        for tool in wanted.tools
        if named in (None, tool.function.name)
    ]
    most = 1 if named is not None or not wanted.parallel else MAX_CALLS
    rules = dialect.rules(tools, most, lambda mark: spelled.get(mark) or json.dumps(mark))
    answer = "calls" if content is None else "(calls | @body)"
    text = f"start: {thought} {answer}\n{_thoughts(spelled) if thought else ''}{rules}"
    return Grammar("tools", text) if content is None else _composed(text, content)


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "additionalProperties": False}


def _thought(thinking: bool, spelled: Mapping[str, str]) -> str:
    """Lark for the reasoning in front of an answer."""
    mark = spelled.get(THINK) or json.dumps(THINK)
    return "thought SPACE" if thinking else f"({mark} thought SPACE)?"


def _thoughts(spelled: Mapping[str, str]) -> str:
    if THOUGHT in spelled:
        thought = f"thought: /(.|\\n)*/ {spelled[THOUGHT]}\n"
    else:
        thought = "thought[lazy]: /(.|\\n)*<\\/think>/\n"
    return thought + "SPACE: /[ \\n]{0,4}/\n"


def _composed(outer: str, body: Grammar) -> Grammar:
    """A grammar that names another `@body`."""
    match body.kind:
        case "json_object":
            inner = f"start: %json {_schema({'type': 'object'}, lenient=False)}"
        case "json_schema":
            inner = f"start: %json {body.text}"
        case "regex":
            inner = f"start: /{llguidance.regex_to_lark(body.text)}/"
        case "choice":
            try:
                inner = "start: " + choice(body.text)
            except GrammarError as error:
                raise _refused("structured_outputs", str(error)) from error
        case _:
            inner = body.text
    grammars = [{"name": "answer", "lark_grammar": outer}, {"name": "body", "lark_grammar": inner}]
    return Grammar("lark" if body.kind == "lark" else "tools", json.dumps({"grammars": grammars}, ensure_ascii=False))


def _refused(param: str, text: str) -> Unservable:
    return Unservable(f"{param}: {text}", param=param)
