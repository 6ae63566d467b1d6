"""How the launcher starts a part: a process that dies with its parent and is named in `ps`.

    python -m pyengine.child --parent PID --name prefill-0 MODULE ARGUMENT...

runs MODULE's `main()` with the arguments. The tie to the parent is made here, right after exec: a hook between fork and
exec (preexec_fn) is unsafe in a process that has threads.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import sys

import setproctitle

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """SIGKILL for this process when `parent` (its parent) dies; also if it has died already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        sys.exit(f"pyengine: the parent {parent} is gone")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pyengine.child")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    die_with(options.parent)
    setproctitle.setproctitle(f"pyengine: {options.name}")
    sys.argv = [options.module.rpartition(".")[2], *options.arguments]
    try:
        status = importlib.import_module(options.module).main()
    except SystemExit as end:
        status = end.code
    leave(status)


def leave(status: object) -> None:
    """Ends the process as sys.exit would, but at once.

    `main` has closed all it had opened. What the interpreter would do beyond that, taking a framework apart object by
    object, costs seconds that Ctrl-C does not have.
    """
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
