"""Goal: the pages' Python runs, and prints what stands there.

Method: all blocks of a page run in one process, one after the other in one namespace, as a reader would paste them. A
block without a language directly behind one shows what that one prints, to the letter.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from .conftest import for_server
from .pages import Snippet, parse, snippets

#: Runs the blocks that stand in stdin as JSON; says what each has printed, as JSON.
RUN = """
import contextlib, io, json, sys
namespace = {"__name__": "__main__"}
printed = []
for where, code in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, where, "exec"), namespace)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""
ALL = snippets()
PYTHON = [snippet for snippet in ALL if snippet.language == "python"]


def run(blocks: list[Snippet], folder: Path) -> list[str]:
    """What each has printed. Raises AssertionError if one fails."""
    code = msgspec.json.encode([(block.where, block.text) for block in blocks])
    ran = subprocess.run(
        [sys.executable, "-c", RUN], input=code, cwd=folder, capture_output=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=list[str])


def compare(blocks: list[Snippet], shown: list[Snippet], printed: list[str]) -> None:
    for block, said in zip(blocks, printed, strict=True):
        for output in shown:
            if output.output_of == block:
                assert said == output.text, output.where


def test_there_is_python() -> None:
    assert {"README.md"} <= {block.page for block in PYTHON}
    assert sum(1 for snippet in ALL if snippet.output_of in PYTHON) >= 3


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_a_pages_blocks_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = [block for block in PYTHON if block.page == page]
    asking = {
        block: replace(block, text=for_server(block.text, request.getfixturevalue("server")))
        for block in blocks
        if ":8000" in block.text
    }
    compare(blocks, ALL, run([asking.get(block, block) for block in blocks], tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n```\n2\n```\n",
        "```python\nimport no_such_module\n```\n",
        "```python\nfrom pyengine import LMM\n```\n",
    ],
)
def test_a_block_that_is_wrong_is_found(text: str, tmp_path: Path) -> None:
    found = parse("page.md", text)
    with pytest.raises(AssertionError):
        compare(found[:1], found, run(found[:1], tmp_path))


def test_blocks_of_a_page_share_their_names(tmp_path: Path) -> None:
    blocks = parse("page.md", "```python\na = 1\n```\n\ntext\n\n```python\nprint(a)\n```\n")
    assert run(blocks, tmp_path) == ["", "1\n"]
