"""The cluster secret: made once, kept with mode 0600 in the state directory, never sent anywhere.

Processes get the path and derive their keys themselves (`_native.derive_key`): "session" to connect, "hash" for block
keys. So what a node keeps on SSD can be found again only under the secret it was made with: a directory for it carries
that secret's mark.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
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
    state_dir = path.parent
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # Written aside and linked: two launchers that start at once agree on one secret, and nobody reads half of it.
        draft = state_dir / f"secret.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()


def claim_ssd(directory: Path, secret: Path) -> None:
    """Makes the directory (0700) for KV that is made under this secret, if it is not there yet.

    Raises ConfigError if it cannot be used, is open to others, or holds KV made under another secret.
    """
    mark = hashlib.blake2b(read_secret(secret), digest_size=16, person=b"pyengine-ssd").hexdigest()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"others may enter the SSD directory {directory}: it holds KV, so chmod 700 it first")
        try:
            with open(directory / MARK, "x") as file:
                file.write(mark + "\n")
        except FileExistsError:
            pass
        known = (directory / MARK).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot keep KV in {directory}: {error.strerror}; name a directory that can be written (--ssd-dir)"
        ) from error
    if known != mark:
        raise ConfigError(
            f"the SSD directory {directory} holds KV made under another secret than {secret}, with which none of it is"
            " found: use the state directory it was made with (--state-dir), or empty it"
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
