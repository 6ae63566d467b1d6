"""Goal: the GPU bench runs to its end, so that a GPU, when there is one, is not spent on finding typing errors; and it
gives no figure that was not measured. Method: its dry run, on the CPU; and its start where there is no GPU."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from bench import gpu  # noqa: E402 (needs torch)


def test_a_dry_run_shows_all_cases_and_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run"])
    gpu.main()
    said = capsys.readouterr()
    lines = [json.loads(each) for each in said.out.splitlines()]
    cases = [each["case"].split()[0] for each in lines]
    assert {"memory", "product", "decode", "prefill"} <= set(cases)
    assert all(each["value"] is None and each.get("ratio") is None for each in lines)
    assert "no figure exists" in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--dry-run" in capsys.readouterr().err
