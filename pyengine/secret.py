"""The cluster secret: made once, kept with mode 0600 in the state directory, never sent anywhere.

Processes get the path and derive their keys themselves (`_native.derive_key`): "session" to connect, "hash" for block
keys. So what a node keeps on SSD can be found again only under the secret it was made with: a directory for it carries
that secret's mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from pyengine.config import ConfigError

SECRET_BYTES = 32
#: In a directory for KV on SSD: digest of the secret under which it was made.
MARK = "secret-mark"


def secret_file(state_dir: Path) -> Path:
    """Path of the secret under `state_dir`, made now if it does not exist yet. Raises ConfigError if it cannot be."""
    path = state_dir / "secret"
    try:
        _make(path)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the cluster secret in {state_dir}: {error.strerror}; "
            "name a directory that can be written (--state-dir or PYENGINE_STATE_DIR)"
        ) from error
    read_secret(path)
    return path


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        _write_once(path, secrets.token_hex(SECRET_BYTES).encode())


def _write_once(path: Path, text: bytes) -> None:
    """Makes a file (0600) with this line, unless it is there: written aside and linked, so that processes that start at
    once agree on one, and nobody ever reads half of it, whatever a writer dies of.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as draft:
        draft.write(text + b"\n")
        draft.flush()
        os.fsync(draft.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft.name, path)


def claim_ssd(directory: Path, secret: Path | None) -> None:
    """Makes the directory (0700) for what is kept under this secret, or under none, if it is not there yet.

    Raises ConfigError if it cannot be used, is open to others, or holds KV made under another secret.
    """
    known_by = b"" if secret is None else read_secret(secret)
    mark = hashlib.blake2b(known_by, digest_size=16, person=b"pyengine-ssd").hexdigest().encode()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"others may enter the SSD directory {directory}: it holds KV, so chmod 700 it first")
        if not (directory / MARK).exists():
            _write_once(directory / MARK, mark)
        known = (directory / MARK).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot keep KV in {directory}: {error.strerror}; name a directory that can be written "
            "(--ssd-dir, ssd_dir=)"
        ) from error
    if known != mark:
        raise ConfigError(
            f"the SSD directory {directory} holds KV made under another secret than {secret}, with which none of it is"
            " found: use the state directory it was made with (--state-dir, state_dir=; a Pool's secret_file=), or"
            " empty it"
        )


def read_secret(path: Path) -> bytes:
    """The secret's bytes: 64 hex digits, or at least 32 raw bytes. Raises ConfigError if unusable or open to others."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the cluster secret {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the cluster secret {path} is readable by others: chmod 600 it")
    text = data.strip()
    if len(text) == 2 * SECRET_BYTES:
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError:
            pass
    if len(data) < SECRET_BYTES:
        raise ConfigError(
            f"the cluster secret {path} is too short: it needs 64 hex digits (delete it to get a new one)"
        )
    return data
