"""A model in the caller's process: `LLM` and `AsyncLLM`, and what it is asked and answers."""

from __future__ import annotations

from pyengine.chat.structured import StructuredOutputs as StructuredOutputs
from pyengine.llm.asynchronous import AsyncLLM as AsyncLLM
from pyengine.llm.asynchronous import AsyncStream as AsyncStream
from pyengine.llm.model import LLM as LLM
from pyengine.llm.model import Stream as Stream
from pyengine.llm.request import Completion as Completion
from pyengine.llm.request import Piece as Piece
from pyengine.llm.request import ToolCall as ToolCall
