"""Goal: every command that a page shows can be run as it stands.

Method: the programs' own parsers read it; what is cheap runs: curl and chat against one server of the fake backend.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import Server

from .conftest import for_server
from .pages import Snippet, inline_code, parse, snippets
from .shell import NAMED, all_flags, calls, check, commands, expect_flags

ALL = snippets()
SHOWN = [(snippet.where, line) for snippet in ALL for line in commands(snippet)]
#: What a line must contain to be run; everything else is long, waits for somebody, or changes the machine.
RUNS = re.compile(r"\bpyengine (?:config|keys|doctor|bench)\b|\bcurl\b.*http://127\.0\.0\.1:8000|\| pyengine chat")
#: Parts of lines of that kind that do not run, with the reason.
NOT_RUN = {
    "--config worker.toml": "a file of the reader's",
    "--trace conversation_trace.jsonl": "a file of the reader's",
    "8124": "of recorded sessions; the same commands stand above them",
    "/etc/": "outside of the test's folder; tests/docs/test_deployment.py runs them elsewhere",
}
#: What the reader has elsewhere, or has time for, and what stands for it here.
HERE = (
    (r"https://example\.org", "http://127.0.0.1:8000"),
    (r"\| pyengine chat$", "| pyengine chat http://127.0.0.1:8000"),
    (r"pyengine bench(?! http)", "pyengine bench http://127.0.0.1:8000"),
    (r" --duration \d+", ""),
    (r"(pyengine bench .*)", r"\1 --duration 1"),
    (r"\bcurl\b", "curl -f"),
)
#: Their whole output stands on the page, the same everywhere but for the digest (of all bits of all figures).
SHOWS = ("conductor simulate", "conductor explain")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
#: Of programs that are not ours.
FOREIGN_FLAGS: set[str] = set()


def test_there_are_commands() -> None:
    programs = {call[0] for _, line in SHOWN for call in calls(line)}
    assert programs >= {"pyengine", "conductor", "transferd", "make", "curl"}


@pytest.mark.parametrize("where", sorted({where for where, _ in SHOWN}))
def test_programs_know_what_they_are_asked(where: str) -> None:
    for line in [line for shown, line in SHOWN if shown == where]:
        for call in calls(line):
            check(call)


def test_commands_in_the_text_have_their_flags() -> None:
    wrong = []
    for where, text in inline_code():
        program, *arguments = text.split() or [""]
        if program in NAMED and arguments:
            try:
                expect_flags(FLAG.findall(text), NAMED[program](arguments), text)
            except AssertionError as error:
                wrong.append(f"{where}: {error}")
    assert not wrong, "\n".join(wrong)


def test_flags_in_the_text_are_some_programs() -> None:
    known = all_flags() | FOREIGN_FLAGS
    assert not [(where, flag) for where, text in inline_code() for flag in FLAG.findall(text) if flag not in known]


#: Once each, though several pages may show it.
RUN = {line: where for where, line in SHOWN if RUNS.search(line) and not any(part in line for part in NOT_RUN)}


@pytest.mark.parametrize(("line", "where"), RUN.items())
def test_it_runs(line: str, where: str, server: Server, tmp_path: Path) -> None:
    line = line.partition("  #")[0].rstrip()
    for there, here in HERE:
        line = re.sub(there, here, line)
    line = for_server(line, server)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYENGINE_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYENGINE_STATE_DIR": str(tmp_path / "state"),
    }
    (tmp_path / "docs").mkdir()  # pages are made into it
    for snippet in ALL:
        named = re.match(r"# ([a-z-]+\.toml)\n", snippet.text)
        if named and where.startswith(f"{snippet.page}:"):
            (tmp_path / named[1]).write_text(snippet.text)
    (tmp_path / "serve.log").touch()  # what the reader's server has said
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )  # fmt: skip
    # The doctor's 1: it has found something to do on this machine.
    well = (0, 1) if "doctor" in line else (0,)
    assert ran.returncode in well, f"{where}: {line}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stdout or ">" in line or "jq" in line, f"{where}: {line} says nothing"


@pytest.mark.parametrize("program", SHOWS)
def test_its_output_is_what_the_page_shows(program: str, tmp_path: Path) -> None:
    [snippet] = [snippet for snippet in ALL if snippet.text.startswith(f"$ {program} ")]
    line, _, shown = snippet.text.removeprefix("$ ").partition("\n")
    command = [sys.executable, "-m", "pyengine.scheduler.cli", *line.split()[1:]]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert without_digest(ran.stdout) == without_digest(shown)


def without_digest(text: str) -> str:
    return re.sub(r"^digest: [0-9a-f]{32}$", "digest", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "```\n$ pyengine serve --no-such-flag 1\n```",
        "```\n$ pyengine sreve\n```",
        "```\n$ pyengine serve --port eight\n```",
        "```\n$ pyengine serve --admission predictive\n```",
        "```\nconductor simulate --trace generated --clutser small\n```",
        "```\ntransferd status --confg d.toml\n```",
        "```\n$ transferd stauts\n```",
        "```\nmake sreve\n```",
        "```\n.venv/bin/python -m bench.gaetway\n```",
        "```\n.venv/bin/python -m bench.loop --quikc\n```",
        "```sh\nno-such-program\n```",
        "    pyengine chat --modle x\n",
        "```\necho x | pyengine chat --modle x\n```",
    ],
)
def test_a_command_that_is_wrong_is_found(text: str) -> None:
    [snippet] = parse("page.md", text)
    with pytest.raises(AssertionError):
        for line in commands(snippet):
            for call in calls(line):
                check(call)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```\n$ make docs\nwhat it says\n$ make test\n```", ["make docs", "make test"]),
        ("```\nmake docs # why\n\nmake test\n```", ["make docs # why", "make test"]),
        ("```\ncurl x -d '{\n}'\nmake test\n```", ["curl x -d '{\n}'", "make test"]),
        ("```\nmake docs \\\n  test\n```", ["make docs   test"]),
        ("```\n client --> gateway\n```", []),
        ("```json\n{}\n```", []),
    ],
)
def test_which_lines_are_commands(text: str, expected: list[str]) -> None:
    [snippet] = parse("page.md", text)
    assert commands(snippet) == expected


def test_a_line_is_cut_into_calls() -> None:
    line = "A_B=1 pyengine serve 2>&1 | tee log > file && make test; cd x"
    assert calls(line) == [["pyengine", "serve"], ["tee", "log"], ["make", "test"], ["cd", "x"]]


def test_an_output_stands_directly_behind_its_block() -> None:
    code, output, other = parse("p", "```python\n1\n```\n```\n1\n```\n\ntext\n\n```\n2\n```\n")
    assert output.output_of == code and other.output_of is None and isinstance(code, Snippet)
