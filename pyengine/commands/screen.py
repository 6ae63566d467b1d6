"""An answer on a terminal while it comes: Markdown, of which what is finished stays and the rest is drawn anew."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from pyengine.commands.talking import Answer

#: Looks a second: as smooth as reading needs.
LOOKS = 10
#: A model may write what a terminal would obey: all controls but the ends of lines and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """The same without characters that a terminal would obey."""
    return _CONTROLS.sub("", text)


def split(text: str) -> tuple[str, str]:
    """(finished blocks, the rest): cut behind the last empty line that is outside a fence of code.

    A block is drawn by itself, so it must not change by what follows it.
    """
    end, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence and line == "\n":
            end = at
    return text[:end], text[end:]


class Screen:
    """Shows `answer` while it grows: `draw` after each piece. Leaving the block writes what is not finished."""

    def __init__(self, console: Console, answer: Answer) -> None:
        self._console, self._answer = console, answer
        self._shown = 0
        self._live = Live(get_renderable=self._rest, console=console, refresh_per_second=LOOKS, transient=True)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def draw(self) -> None:
        """Writes the blocks that have been finished since."""
        finished, _ = split(harmless(self._answer.text))
        if len(finished) > self._shown:
            self._console.print(Markdown(finished[self._shown :]))
            self._console.print()
            self._shown = len(finished)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rest = harmless(self._answer.text)[self._shown :]
        self._shown += len(rest)
        self._live.stop()
        if rest.strip():
            self._console.print(Markdown(rest))

    def _rest(self) -> RenderableType:
        """What is not finished: of what is higher than the screen, the end."""
        text = harmless(self._answer.text)[self._shown :]
        if not text.strip():
            words = len(self._answer.thought.split())
            return Text(f"thinking ({words} words)" if words else "...", style="dim")
        lines = text.split("\n")
        height = max(self._console.size.height - 3, 3)
        if len(lines) > height:
            cut = lines[-height:]
            opened = next((line for line in lines[:-height] if line.lstrip().startswith(("```", "~~~"))), None)
            lines = ([opened] if opened is not None else []) + cut
        return Markdown("\n".join(lines))
