"""A model in the caller's process: `LLM`, and `AsyncLLM` over it."""

from __future__ import annotations

from pyengine.llm.model import LLM as LLM
from pyengine.llm.model import Completion as Completion
