"""Goal: the pages' Python runs, and prints what stands there.

Method: all blocks of a page run one after the other in one namespace, as a reader would paste them; all pages in one
process, as frameworks take seconds to load. A block without a language directly behind one shows what that one prints,
to the letter.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.server import Server

from .conftest import for_server
from .pages import Snippet, parse, snippets

#: Runs pages that stand in stdin as JSON, {page: [[where, code], ...]}; says what each block has printed. A block that
#: fails ends its page with the traceback.
RUN = """
import contextlib, io, json, sys, traceback
said = {}
for page, blocks in json.load(sys.stdin).items():
    namespace, printed, error = {"__name__": "__main__"}, [], ""
    for where, code in blocks:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(code, where, "exec"), namespace)
        except BaseException:
            error = traceback.format_exc()
            break
        printed.append(out.getvalue())
    said[page] = [printed, error]
    namespace.clear()
print(json.dumps(said))
"""
ALL = snippets()
PYTHON = [snippet for snippet in ALL if snippet.language == "python"]
PAGES = sorted({block.page for block in PYTHON})
#: By page: what each block has printed, and the traceback of one that failed.
Said = dict[str, tuple[list[str], str]]


def run(blocks: list[Snippet], folder: Path) -> Said:
    pages: dict[str, list[tuple[str, str]]] = {}
    for block in blocks:
        pages.setdefault(block.page, []).append((block.where, block.text))
    ran = subprocess.run(
        [sys.executable, "-c", RUN],
        input=msgspec.json.encode(pages),
        cwd=folder,
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=Said)


def compare(page: str, found: list[Snippet], said: Said) -> None:
    """Raises AssertionError if a block of the page has failed, or printed something else than stands behind it."""
    printed, error = said[page]
    assert not error, error
    blocks = [block for block in found if block.page == page and block.language == "python"]
    for block, text in zip(blocks, printed, strict=True):
        for output in found:
            if output.output_of == block:
                assert text == output.text, output.where


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Said:
    asking = [
        replace(block, text=for_server(block.text, server)) if ":8000" in block.text else block for block in PYTHON
    ]
    return run(asking, tmp_path_factory.mktemp("pages"))


def test_there_is_python() -> None:
    assert {"README.md", "docs/pool.md", "docs/transfer-engine.md"} <= set(PAGES)
    assert sum(1 for snippet in ALL if snippet.output_of in PYTHON) >= 4


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_blocks_run(page: str, said: Said) -> None:
    compare(page, ALL, said)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n```\n2\n```\n",
        "```python\nimport no_such_module\n```\n",
        "```python\nfrom pyengine import LMM\n```\n",
        "```python\nraise SystemExit\n```\n",
    ],
)
def test_a_block_that_is_wrong_is_found(text: str, tmp_path: Path) -> None:
    found = parse("page.md", text)
    with pytest.raises(AssertionError):
        compare("page.md", found, run(found[:1], tmp_path))


def test_blocks_of_a_page_share_their_names_and_pages_do_not(tmp_path: Path) -> None:
    text = "```python\na = globals().get('a', 0) + 1\n```\n\ntext\n\n```python\nprint(a)\n```\n"
    assert run(parse("one.md", text) + parse("two.md", text), tmp_path) == {
        "one.md": (["", "1\n"], ""),
        "two.md": (["", "1\n"], ""),
    }
