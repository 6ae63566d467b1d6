"""Goal: what several gateways have counted is told whole by each, and no counter ever falls, whoever dies.
Method: several in one loop, each with figures of its own; death is leaving without a word.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pyengine.gateway import siblings
from pyengine.gateway.metrics import Families
from pyengine.gateway.siblings import Siblings, Told

NAMES = ("gateway-0", "gateway-1", "gateway-2")
COUNTER, GAUGE = "vllm:generation_tokens_total", "pyengine_gateway_requests"


class Figures:
    """What one life of a gateway has counted."""

    def __init__(self, count: int, active: int) -> None:
        self.count, self.active = count, active

    def tell(self) -> Told:
        families: Families = {
            COUNTER: {f'{COUNTER}{{model_name="m"}}': self.count},
            GAUGE: {f'{GAUGE}{{model_name="m",state="running"}}': self.active},
        }
        return Told(families, self.active)


def totals(told: Told) -> tuple[float, float, int]:
    return sum(told.families[COUNTER].values()), sum(told.families[GAUGE].values()), told.active


async def test_each_tells_of_all_and_no_counter_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only what is told is saved here: the clock's part would hide that it is.
    monkeypatch.setattr(siblings, "SAVE_EVERY", 3600.0)
    figures = [Figures(1, 1), Figures(20, 2), Figures(300, 3)]
    made = [Siblings(tmp_path, NAMES, name, own.tell) for name, own in zip(NAMES, figures, strict=True)]
    for each in made:
        await each.start()
    for each in made:
        assert totals(await each.all()) == (321, 6, 6)
    figures[1].count = 25
    assert totals(await made[0].all()) == (326, 6, 6)
    # Dies: it answers nobody, and its figures are gone but for what it had told.
    figures[1].count = 29
    assert made[1]._server is not None
    made[1]._server.close()
    assert totals(await made[2].all()) == (326, 4, 4)
    # Its next life goes on from there, and a later one from both.
    figures[1] = Figures(3, 1)
    for count in (3, 7):
        again = Siblings(tmp_path, NAMES, NAMES[1], figures[1].tell)
        await again.start()
        assert totals(await made[0].all()) == (301 + 25 + count, 5, 5)
        figures[1] = Figures(4, 1)
        await again.close()
    assert totals(await made[0].all()) == (301 + 25 + 7, 4, 4)
    for each in (made[0], made[2]):
        await each.close()


async def test_one_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "PATIENCE", 0.05)
    first, second = (Siblings(tmp_path, NAMES[:2], name, Figures(5, 1).tell) for name in NAMES[:2])
    await first.start()
    await second.start()
    await first.all()

    async def hangs(*_: object) -> None:
        """Takes the connection, and says nothing."""

    assert second._server is not None
    second._server.close()
    (tmp_path / NAMES[1]).unlink(missing_ok=True)
    server = await asyncio.start_unix_server(hangs, tmp_path / NAMES[1])
    assert totals(await first.all()) == (10, 1, 1)
    server.close()
    await first.close()
    await second.close()


async def test_a_saving_that_fails_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk: figures are told all the same, and saved when there is room again."""
    monkeypatch.setattr(siblings, "SAVE_EVERY", 0.01)
    figures = Figures(5, 1)
    made = Siblings(tmp_path, NAMES[:1], NAMES[0], figures.tell)
    await made.start()
    file = tmp_path / f"{NAMES[0]}.counters"
    async with asyncio.timeout(60.0):
        while not file.exists():
            await asyncio.sleep(0.005)
    (tmp_path / f"{NAMES[0]}.new").unlink(missing_ok=True)
    (tmp_path / f"{NAMES[0]}.new").mkdir()
    figures.count = 7
    assert totals(await made.all()) == (7, 1, 1) and totals(await made.all()) == (7, 1, 1)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    (tmp_path / f"{NAMES[0]}.new").rmdir()
    saved = file.read_bytes()
    async with asyncio.timeout(60.0):
        while file.read_bytes() == saved:
            await asyncio.sleep(0.005)
    await made.close()
