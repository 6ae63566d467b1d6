"""Goal: the README's examples run and print what stands there. Method: cut them out, run them, compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("heading", ["TransferEngine", "Pool"])
def test_the_example_prints_what_the_readme_says(heading: str) -> None:
    section = README.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    program, _, rest = section.partition("```python\n")[2].partition("```\n")
    expected = rest.partition("```\n")[2].partition("```")[0]
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected
