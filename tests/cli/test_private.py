"""Goal: what commands write for their user alone is so, whatever lay there before. Method: the commands' own writers
over files, links and pipes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine.commands.bundle import write_bundle
from pyengine.commands.chat import Talk
from pyengine.scheduler.backends.http import Address


def bundle(path: Path) -> None:
    write_bundle(path, [], [], {}, None, {})


def talk(path: Path) -> None:
    Talk(Address("http://127.0.0.1:1", None), "m", "be brief", {}).save(path)


@pytest.fixture(params=[bundle, talk])
def write(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    found: Callable[[Path], None] = request.param
    return found


def test_a_file_that_others_could_read_is_closed_to_them(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    whole = path.stat().st_size
    path.write_bytes(b"x" * 100_000)
    path.chmod(0o644)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # A bundle's compressed length is its files' names and times.
    assert abs(path.stat().st_size - whole) < 100


def test_a_link_is_not_followed(write: Callable[[Path], None], tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_text("untouched")
    target.chmod(0o644)
    path.symlink_to(target)
    with pytest.raises(OSError, match="it is a symbolic link"):
        write(path)
    assert target.read_text() == "untouched" and stat.S_IMODE(target.stat().st_mode) == 0o644
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="it is a symbolic link"):
        write(path)
    assert not (tmp_path / "nothing").exists()


def test_what_is_no_file_is_left_alone(write: Callable[[Path], None], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o644)
    with pytest.raises(OSError, match="No such device"):
        write(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="it is no regular file"):
            write(tmp_path / "pipe")
    finally:
        os.close(reading)
    assert stat.S_IMODE((tmp_path / "pipe").stat().st_mode) == 0o644
    with pytest.raises(IsADirectoryError):
        write(tmp_path)
