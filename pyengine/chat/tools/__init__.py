"""Tools: how models are told of them, how they call them, and how calls are found in what they write."""

from __future__ import annotations

from pyengine.chat.tools.dialect import Dialect as Dialect
from pyengine.chat.tools.dialect import Tool as Tool
from pyengine.chat.tools.hermes import HERMES
from pyengine.chat.tools.llama3 import LLAMA3
from pyengine.chat.tools.mistral import MISTRAL

#: In the order in which they are tried.
DIALECTS = (HERMES, MISTRAL, LLAMA3)


def dialect_of(template: str) -> Dialect | None:
    """That of a model with this chat template; None if its template knows no tools, or of a way to call that we do not.

    A template that shows the model no tools teaches it no dialect: see prompting.py.
    """
    if not knows_tools(template):
        return HERMES
    return next((dialect for dialect in DIALECTS if dialect.speaks(template)), None)


def knows_tools(template: str) -> bool:
    """The template shows the model its tools by itself."""
    return "tools" in template
