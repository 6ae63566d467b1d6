"""python ask.py FRAMEWORK MODEL STATE FILE: serves MODEL where no other framework is; writes greedy token ids.

Run by run.sh, in an environment made for it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from bench.server import Server

OTHER = {"torch": "jax", "jax": "torch"}


def main(framework: str, model: str, state: str, file: str) -> None:
    other = OTHER[framework]
    assert importlib.util.find_spec(other) is None, f"{other} came along with {framework}"
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "pyengine", "serve", "--backend", other, "--model", model],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2, refused
    assert f"backend {other} needs {other}" in refused.stderr, refused.stderr
    flags = ("--dram-bytes", "64MiB", "--pages", "64", "--nodes", "2", "--transport", "tcp")
    with Server(*flags, model=model, backend=framework, state_dir=state, start_timeout=300.0) as server:
        body = {"model": Path(model).name, "prompt": list(range(40)), "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"{server.base}/v1/completions",
            json.dumps(body | {"ignore_eos": True, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            ids = json.load(response)["choices"][0]["token_ids"]
    assert len(ids) == 12, ids
    Path(file).write_text(f"{ids}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
