"""The pages as their tests see them: what is shown in fences and indented blocks, and what stands in `backquotes`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Snippet:
    """One block. language: what the fence says, "" if nothing. output_of: the block that this one, without a language,
    stands directly behind, with no word between: then it shows what that one prints.
    """

    page: str
    line: int
    language: str
    text: str
    output_of: Snippet | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All that are written by hand or made from the code, but those of docs/ that only include one of the root."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in docs if "{include}" not in page.read_text()),
    ]


def parse(page: str, text: str) -> list[Snippet]:
    found: list[Snippet] = []
    before: Token | None = None
    for token in MarkdownIt().enable("table").parse(text):
        if token.type in {"fence", "code_block"}:
            assert token.map is not None
            language = token.info.strip()
            behind = before is not None and before.type == "fence" and token.type == "fence" and not language
            found.append(Snippet(page, token.map[0] + 1, language, token.content, found[-1] if behind else None))
        before = token
    return found


def snippets() -> list[Snippet]:
    return [snippet for page in pages() for snippet in parse(str(page.relative_to(ROOT)), page.read_text())]


def inline_code() -> list[tuple[str, str]]:
    """(page:line, text) of all that stands in backquotes within the text."""
    return [
        (f"{page.relative_to(ROOT)}:{token.map[0] + 1 if token.map else 0}", child.content)
        for page in pages()
        for token in MarkdownIt().enable("table").parse(page.read_text())
        for child in token.children or ()
        if child.type == "code_inline"
    ]
