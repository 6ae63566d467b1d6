"""A conductor behind its sockets."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.service import Service

KEY = bytes(range(32))
#: Seconds: far longer than an end takes.
PATIENCE = 60.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    tmp_path.chmod(0o700)
    service = Service(Conductor(), f"ipc://{tmp_path}/conductor", "127.0.0.1:0", KEY)
    thread = threading.Thread(target=service.run)
    thread.start()
    yield service
    service.stop()
    thread.join(PATIENCE)
    service.close()
