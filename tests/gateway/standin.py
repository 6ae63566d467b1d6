"""A child for launcher tests: `main()` behaves as its first argument says.

serve FD: ready, ends on SIGTERM. stubborn FD: ready, ignores SIGTERM. flash FD: ready, then ends with status 1.
crash: ends with status 1 at once. impossible: ends with status 2.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    behaviour = sys.argv[1]
    if behaviour in ("crash", "impossible"):
        return {"crash": 1, "impossible": 2}[behaviour]
    ended = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    os.write(int(sys.argv[2]), b'{"address": "here"}\n')
    if behaviour == "flash":
        return 1
    signal.sigwait(ended if behaviour == "serve" else {signal.SIGUSR1})
    return 0
