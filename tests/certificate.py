"""A certificate of this test run."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[str, str]:
    """PEM files of a certificate for localhost and 127.0.0.1, signed by itself, and of its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60)
    return cert, key
