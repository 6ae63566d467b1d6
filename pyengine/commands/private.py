"""Files that a command writes for its user's eyes only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_private(path: Path) -> BinaryIO:
    """An empty file of mode 0600, whatever mode one that was there had.

    Raises OSError, and has changed nothing, for a link, for what is no file, and for a file of somebody else's.
    """
    # Not waited for: a pipe that nobody reads. Not emptied yet: it may be one that is left alone.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    file = os.fdopen(descriptor, "wb")
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
    except OSError:
        file.close()
        raise
    return file
