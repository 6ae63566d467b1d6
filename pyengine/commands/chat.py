"""`pyengine chat`: a conversation in a terminal, or one question in a pipe.

    pyengine chat                          asks the gateway that `pyengine serve` has started
    echo "Name a colour." | pyengine chat  one answer to stdout, as it comes, and nothing else there

Exit status: 0, 1 if the gateway did not answer (in a pipe), 2 impossible as asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from pyengine import env
from pyengine.commands.private import open_private
from pyengine.commands.screen import Screen, harmless
from pyengine.commands.talking import Answer, Message, Refused, models, say
from pyengine.scheduler.backends.http import Address

DEFAULT_URL = "http://127.0.0.1:8000"
#: Lines that the arrow keys bring back, also tomorrow.
HISTORY = 1000
#: Of a question that comes by a pipe: what a gateway takes in one request, and less than fills a memory.
MAX_QUESTION = 16 << 20
HELP = {
    "/reset": "begin anew; the system prompt stays",
    "/system": "TEXT: set the system prompt (alone: show it)",
    "/model": "NAME: ask another model (alone: which there are)",
    "/save": "FILE: write the conversation as JSON",
    "/help": "this",
    "/quit": "leave (also Ctrl-D)",
}
MORE = 'A line that ends with \\ goes on in the next; """ begins and ends several lines. Ctrl-C stops an answer.'


def chat(
    url: str = DEFAULT_URL,
    *,
    model: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> int:
    """Talks to a model. An API key is taken from PYENGINE_API_KEY. /help shows what else can be typed.

    Parameters
    ----------
    url
        The gateway.
    model
        Name there (default: the first).
    system
        System prompt.
    temperature
        0: always the likeliest token (default: the gateway's).
    max_tokens
        Tokens of an answer at most (default: the gateway's).
    """

    def run() -> int:
        given = {"temperature": temperature, "max_tokens": max_tokens}
        options = {name: value for name, value in given.items() if value is not None}
        talk = Talk(Address(url, env.api_key()), model, system, options)
        try:
            talk.find_model()
        except OSError as error:
            return _complain(
                f"no gateway answers at {url}: {_reason(error)}; start one (pyengine serve) or name its URL"
            )
        except Refused as error:
            return _complain(str(error))
        return converse(talk) if sys.stdin.isatty() and sys.stdout.isatty() else pipe(talk)

    from pyengine.cli import guarded

    return guarded("chat", run)


class Talk:
    """A conversation. messages: what was said, in the API's form, without the system prompt."""

    def __init__(self, address: Address, model: str | None, system: str | None, options: dict[str, Any]) -> None:
        self.address, self.system, self.options = address, system, options
        self.model = model or ""
        self.messages: list[Message] = []

    def find_model(self) -> list[str]:
        """All there are; the first of them, if none was named. Raises OSError, Refused."""
        found = asyncio.run(models(self.address))
        if not self.model:
            if not found:
                raise Refused(f"{self.address.url} serves no model yet: ask again when its /health is 200", 503)
            self.model = found[0]
        return found

    def ask(self, question: str, answer: Answer, on_piece: Callable[[], None]) -> None:
        """Fills `answer`. What came before Ctrl-C (KeyboardInterrupt) or an error stays part of the conversation; a
        question without any answer does not. Raises OSError, Refused, KeyboardInterrupt.
        """
        self.messages.append({"role": "user", "content": question})
        try:
            asyncio.run(say(self.address, self.model, self.all(), self.options, answer, on_piece))
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()

    def all(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def save(self, path: Path) -> None:
        """For its user's eyes only. Raises OSError."""
        data = msgspec.json.format(msgspec.json.encode({"model": self.model, "messages": self.all()}), indent=1)
        with open_private(path) as file:
            file.write(data + b"\n")


def pipe(talk: Talk) -> int:
    """One question from stdin; its answer to stdout as it comes. Figures go to stderr if somebody is there."""
    question = sys.stdin.read(MAX_QUESTION + 1).strip()
    if not question or len(question) > MAX_QUESTION:
        return _complain("ask something on stdin, of 16 MiB at most: echo 'Name a colour.' | pyengine chat", 2)
    answer, written = Answer(), 0

    def write() -> None:
        nonlocal written
        new = answer.text[written:]
        written = len(answer.text)
        sys.stdout.write(harmless(new) if sys.stdout.isatty() else new)
        sys.stdout.flush()

    try:
        talk.ask(question, answer, write)
    except (OSError, Refused) as error:
        return _complain(f"{_reason(error)}; what came is no whole answer" if answer.text else _reason(error))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 0
    sys.stdout.write("" if answer.text.endswith("\n") else "\n")
    if sys.stderr.isatty():
        sys.stderr.write(answer.line() + "\n")
    return 0


def converse(talk: Talk) -> int:
    """Until /quit or the end of what is typed."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(talk.model)}[/] at {escape(talk.address.url)}; /help shows what can be typed")
    with _history():
        while True:
            try:
                typed = read()
            except EOFError:
                console.print()
                return 0
            except KeyboardInterrupt:
                console.print("\n[dim]Ctrl-D or /quit leaves[/]")
                continue
            if not typed.strip():
                continue
            if typed.startswith("/"):
                if not obey(talk, typed, console):
                    return 0
                continue
            _answer(talk, typed, console)


def _answer(talk: Talk, question: str, console: Console) -> None:
    answer = Answer()
    try:
        with Screen(console, answer) as screen:
            talk.ask(question, answer, screen.draw)
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]")
    except (OSError, Refused) as error:
        console.print(f"[red]{escape(harmless(_reason(error)))}[/]")
        return
    console.print(f"[dim]{answer.line()}[/]\n")


def read(line: Callable[[str], str] = input) -> str:
    """What the user types, of one line or several. Raises EOFError, KeyboardInterrupt."""
    text = line("> ")
    if text.strip().startswith('"""'):
        lines = [text.strip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(line(". "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + line(". ")
    return text


def obey(talk: Talk, typed: str, console: Console) -> bool:
    """Does what a line with a slash says; False: leave."""
    name, _, rest = typed.partition(" ")
    rest = rest.strip()
    match name:
        case "/quit" | "/exit":
            return False
        case "/help":
            console.print("\n".join(f"[bold]{each}[/] {escape(what)}" for each, what in HELP.items()))
            console.print(f"[dim]{escape(MORE)}[/]")
        case "/reset":
            talk.messages.clear()
            console.print("[dim]a new conversation[/]")
        case "/system":
            talk.system = rest or talk.system
            console.print(f"[dim]system prompt: {escape(talk.system or 'none')}[/]")
        case "/model":
            _choose(talk, rest, console)
        case "/save":
            try:
                talk.save(Path(rest or ".").expanduser())
                console.print(f"[dim]{len(talk.messages)} messages are in {escape(rest)}[/]")
            except OSError as error:
                console.print(f"[red]cannot write {escape(rest or 'it')}: {error.strerror}; write /save FILE[/]")
        case _:
            near = difflib.get_close_matches(name, HELP, n=1)
            console.print(
                f"[red]{escape(name)} is nothing: " + (f"did you mean {near[0]}?" if near else "see /help") + "[/]"
            )
    return True


def _choose(talk: Talk, name: str, console: Console) -> None:
    try:
        found = talk.find_model()
    except (OSError, Refused) as error:
        console.print(f"[red]{escape(harmless(_reason(error)))}[/]")
        return
    if name and name not in found:
        console.print(f"[red]{escape(name)} is not served: there are {escape(', '.join(found))}[/]")
        return
    talk.model = name or talk.model
    console.print(f"[dim]{escape(talk.model)} of {escape(', '.join(found))}[/]")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Arrow keys, and what was typed on other days, if this Python can; the file is for its user's eyes only."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = env.read().state_dir / "chat_history"
    readline.set_history_length(HISTORY)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        # A state directory that cannot be written costs the history, and nothing else.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(path)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return getattr(error, "strerror", None) or str(error)


def _complain(text: str, status: int = 1) -> int:
    sys.stderr.write(f"pyengine chat: error: {text}\n")
    return status
