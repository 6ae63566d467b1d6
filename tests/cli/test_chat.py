"""Goal: `pyengine chat` is a client that one can live with: in a terminal, in a pipe, with Ctrl-C, with bad servers.
Method: a scripted server of the API; the command in a pseudo-terminal and in a pipe; the drawing alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.commands.chat import read
from pyengine.commands.screen import harmless, split

from .server import Api, serving

PATIENCE = 30.0
RUN = (sys.executable, "-m", "pyengine", "chat")


def environment(state: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYENGINE_")}
    return {**kept, "PYENGINE_STATE_DIR": str(state), "TERM": "xterm", "COLUMNS": "100", **more}


class Terminal:
    """A person at a terminal: types, and reads until something is there."""

    def __init__(self, *words: str, state: Path, **more: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*RUN, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(state, **more),
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """What came up to `text`, which must come."""
        end = time.monotonic() + PATIENCE
        while text not in self._seen:
            assert select.select([self._master], [], [], max(end - time.monotonic(), 0))[0], (text, self._seen)
            try:
                part = os.read(self._master, 1 << 16)
            except OSError:
                part = b""
            assert part, (text, self._seen)
            self._seen += part.decode(errors="replace")
        head, _, self._seen = self._seen.partition(text)
        return head

    def insist(self, key: str, text: str) -> None:
        """Types it again each second until `text` is there: CPython loses a Ctrl-C that comes when its prompt is there,
        and it does not wait for what is typed yet.
        """
        for _ in range(int(PATIENCE)):
            self.type(key)
            if select.select([self._master], [], [], 1.0)[0]:
                break
        self.until(text)

    def leave(self) -> int:
        """Types Ctrl-D each second until it has left: one that comes before the prompt is there is lost."""
        for _ in range(int(PATIENCE)):
            self.type("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1.0)
        raise AssertionError(("it does not leave", self._seen))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(Api()) as found:
        yield found


def test_a_conversation_in_a_terminal(api: Api, tmp_path: Path) -> None:
    api.models = ["tiny", "other"]
    api.answers = [["# Tit", "le\n\nsome **bo", "ld** text"], ["sec\x1b[31mond"], ["third"], 503, ["fourth"]]
    terminal = Terminal(api.url, "--system", "be brief", state=tmp_path, PYENGINE_API_KEY="the-key")
    try:
        terminal.until("tiny")
        terminal.until("> ")
        terminal.type("hello\r")
        shown = terminal.until("3 tokens")
        assert "Title" in shown and "bold" in shown and "**" not in shown.rpartition("Title")[2]
        assert "tokens/s" in (line := terminal.until("> ")) and "first after" in line and "4 of them cached" in line
        terminal.type('"""one\rtwo"""\r')
        assert "\x1b[31m" not in terminal.until("1 tokens")
        terminal.type("/model other\r")
        terminal.until("other of tiny, other")
        terminal.type("/reset\r")
        terminal.until("a new conversation")
        terminal.type("/sytsem\r")
        terminal.until("did you mean /system?")
        terminal.type("a\\\rb\r")
        terminal.until("1 tokens")
        saved = tmp_path / "talk.json"
        terminal.type(f"/save {saved}\r")
        terminal.until("2 messages are in")
        terminal.type("no luck\r")
        terminal.until("ask again in a moment")
        terminal.type("again\r")
        terminal.until("1 tokens")
        terminal.type("/quit\r")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()
    _, headers, bodies = zip(*api.asked, strict=True)
    assert {each["authorization"] for each in headers} == {"Bearer the-key"}
    system = {"role": "system", "content": "be brief"}
    assert bodies[0]["messages"] == [system, {"role": "user", "content": "hello"}]
    assert [each["content"] for each in bodies[1]["messages"]][1:] == [
        "hello",
        "# Title\n\nsome **bold** text",
        "one\ntwo",
    ]
    assert bodies[2]["messages"] == [system, {"role": "user", "content": "a\nb"}] and bodies[2]["model"] == "other"
    # The question without an answer is no part of what is said later.
    assert [each["content"] for each in bodies[4]["messages"]] == ["be brief", "a\nb", "third", "again"]
    assert json.loads(saved.read_text())["messages"][-1] == {"role": "assistant", "content": "third"}
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE((tmp_path / "chat_history").stat().st_mode) == 0o600
    assert "hello" in (tmp_path / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_nothing_else(api: Api, tmp_path: Path) -> None:
    api.hold, api.answers = True, [["half of an ans", "wer"]]
    terminal = Terminal(api.url, state=tmp_path)
    try:
        terminal.until("> ")
        terminal.type("hello\r")
        terminal.until("half of an answer")
        terminal.type("\x03")
        terminal.until("stopped")
        assert api.left.wait(PATIENCE), "the connection stays open: the gateway works on"
        api.hold, api.answers = False, [["whole"]]
        terminal.type("go on\r")
        terminal.until("whole")
        terminal.until("> ")
        terminal.insist("\x03", "leaves")
        assert terminal.leave() == 0
    finally:
        terminal.close()
    assert api.asked[1][2]["messages"][1] == {"role": "assistant", "content": "half of an answer"}


def piped(words: tuple[str, ...], typed: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words], input=typed, env=environment(state), capture_output=True, text=True, timeout=PATIENCE
    )


def test_in_a_pipe_there_is_the_answer_and_nothing_else(api: Api, tmp_path: Path) -> None:
    api.answers = [["**raw**", " é\x1b "]]
    done = piped((api.url, "--max-tokens", "5", "--temperature", "0"), "hi\n", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "**raw** é\x1b \n", "")
    assert api.asked[0][2]["max_tokens"] == 5 and api.asked[0][2]["messages"] == [{"role": "user", "content": "hi"}]
    api.answers = [401]
    done = piped((api.url,), "hi\n", tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and "set PYENGINE_API_KEY" in done.stderr
    assert not (tmp_path / "chat_history").exists()


@pytest.mark.parametrize(
    ("words", "typed", "status", "says"),
    [
        (("http://127.0.0.1:1",), "hi", 1, "start one (pyengine serve)"),
        (("nonsense",), "hi", 2, "http://HOST:PORT"),
    ],
)
def test_mistakes(words: tuple[str, ...], typed: str, status: int, says: str, tmp_path: Path) -> None:
    done = piped(words, typed, tmp_path)
    assert (done.returncode, done.stdout) == (status, "") and says in done.stderr and "Traceback" not in done.stderr


def test_several_lines() -> None:
    def typed(*lines: str) -> str:
        rest = iter(lines)
        return read(lambda _: next(rest))

    assert typed("one") == "one"
    assert typed("one\\", "two\\", "three") == "one\ntwo\nthree"
    assert typed('"""one', "two", 'three"""') == "one\ntwo\nthree"
    assert typed('"""', "two", '"""') == "two"


@given(st.lists(st.sampled_from(["a\n", "\n", "```py\n", "```\n", "~~~\n", "````\n", "  x\n", "b"]), max_size=30))
def test_what_is_finished_stays_finished(lines: list[str]) -> None:
    """However the text comes, no block is cut within a fence, nothing is lost, and what was shown is not changed."""
    text = "".join(lines)
    before = ""
    for end in range(len(text) + 1):
        finished, rest = split(text[:end])
        assert finished + rest == text[:end] and finished.startswith(before)
        assert not finished or finished.endswith("\n\n") or finished.strip("\n") == ""
        before = finished


def test_a_fence_is_one_block() -> None:
    assert split("a\n\n```py\n\n\nx\n") == ("a\n\n", "```py\n\n\nx\n")
    assert split("```py\n\nx\n```\n\nb")[1] == "b"
    assert split("````\n```\n\n````\n\nb")[1] == "b"


def test_a_terminal_obeys_no_model() -> None:
    assert harmless("a\x1b]0;title\x07b\tc\nd\x9b31m\r") == "a]0;titleb\tc\nd31m"


def test_signals_are_the_terminals(api: Api, tmp_path: Path) -> None:
    """In a pipe Ctrl-C ends the command, after what came."""
    api.hold, api.answers = True, [["half"]]
    process = subprocess.Popen(
        [*RUN, api.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(tmp_path), text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("hi")
    process.stdin.close()
    assert process.stdout.read(4) == "half"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    process.stdout.close()
