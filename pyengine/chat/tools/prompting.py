"""Tools for models whose chat template shows them none: said in words, in the dialect most models know (hermes.py).

Their templates know system, user and assistant only, so calls become text again, and results come from the user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pyengine.chat.tools.hermes import CLOSE, OPEN

INSTRUCTION = f"""\
You can call functions. Each line is the description of one, as JSON:
{{tools}}

To call one, answer with its name and its arguments as JSON between these marks, and with nothing else:
{OPEN}
{{{{"name": "the function's name", "arguments": {{{{"an argument's name": "its value"}}}}}}}}
{CLOSE}
For several calls write several such blocks. What they return comes between <tool_response> and </tool_response>."""


def in_words(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its tools, for a template that knows neither them nor calls nor results."""
    told: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if told and told[-1]["role"] == "user" and told[-1].get("result"):
                # Templates often want the roles to take turns.
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "result": True})
            continue
        calls = [
            f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
            for call in message.get("tool_calls", ())
        ]
        told.append({"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))})
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        words = INSTRUCTION.format(tools=functions)
        if told and told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{words}"
        else:
            told.insert(0, {"role": "system", "content": words})
    return [{name: value for name, value in message.items() if name != "result"} for message in told]
