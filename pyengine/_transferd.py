"""Console script `transferd` of the wheel: the same code as the Rust binary. Loads nothing else of the package."""

from __future__ import annotations

import sys

from pyengine._native import transferd_main


def main() -> None:
    """Runs `transferd` with this process's arguments and exits with its status."""
    sys.exit(transferd_main(sys.argv[1:]))


if __name__ == "__main__":
    main()
