"""Goal: docs/ builds into a site without a warning, and the site loads nothing from anywhere else.

Method: build it once (Sphinx tells of dead links between pages and of pages that nothing leads to), then read all that
was built.
"""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(target / ".trees")]
    return subprocess.run(
        [*command, str(source), str(target)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT / "docs", target)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return target


class Loads(HTMLParser):
    """Collects what a browser fetches to show a page: not links, which are followed by people."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name in {"src", "srcset", "poster", "data"} or (name == "href" and tag in {"link", "use"})):
                self.found.append(value)
            if value and name == "style":
                self.found += re.findall(r"url\(['\"]?([^'\")]+)", value)


def loaded_by(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".css":
        return re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", text)
    parser = Loads()
    parser.feed(text)
    return parser.found


def is_remote(target: str) -> bool:
    return re.match(r"(?:[a-z]+:)?//", target) is not None


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    read = [path for suffix in ("html", "css", "svg") for path in site.rglob(f"*.{suffix}")]
    loads = [(path.name, target) for path in read for target in loaded_by(path)]
    assert len(loads) > 100  # stylesheets and scripts of each page: the parser sees something
    assert not [(name, target) for name, target in loads if is_remote(target)]


def test_what_a_page_loads_is_in_the_site(site: Path) -> None:
    for path in site.rglob("*.html"):
        for target in loaded_by(path):
            if not target.startswith(("data:", "#")):
                assert (path.parent / re.split(r"[?#]", target)[0]).exists(), f"{path.name} loads {target}"


@pytest.mark.parametrize(
    ("page", "remote"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/x">', ["//fonts.example/x"]),
        ('<p style="background: url(http://example/x.png)">', ["http://example/x.png"]),
        ('<a href="https://example.com">a link</a><img src="x.png">', []),
    ],
)
def test_what_counts_as_loaded(page: str, remote: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    assert [target for target in loaded_by(tmp_path / "page.html") if is_remote(target)] == remote
