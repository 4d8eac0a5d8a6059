"""Orders to ranks as files."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.training import orders
from agentrl.training.orders import Orders, answer, arriving


def carry_out(folder: Path, seen: list[Any]) -> None:
    for path, order in arriving(folder):
        seen.append(order)
        answer(path, {"twice": 2 * order["number"]})


def test_orders_are_carried_out_in_turn_and_leave_nothing(tmp_path: Path) -> None:
    given = Orders(tmp_path / "orders", lambda: None)
    seen: list[Any] = []
    rank = threading.Thread(target=carry_out, args=(given.folder, seen))
    rank.start()
    assert [given.give("double", number=number)["twice"] for number in (1, 5)] == [2, 10]
    assert [path.name for path in given.folder.iterdir()] == ["lock"]
    given.close()
    rank.join(5)
    assert not rank.is_alive()
    assert seen == [{"do": "double", "number": 1}, {"do": "double", "number": 5}]


def test_nobody_waits_for_ranks_that_ended(tmp_path: Path) -> None:
    def ended() -> None:
        raise RuntimeError("the ranks ended")

    with pytest.raises(RuntimeError, match="the ranks ended"):
        Orders(tmp_path / "orders", ended).give("double", number=1)


def hold(parent: Path, told: Any) -> None:
    given = Orders(parent, lambda: None)
    told.put(str(given.folder))
    time.sleep(60)


def test_ranks_end_if_whoever_gave_them_orders_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "ALIVE_S", 0.05)
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    giver = fork.Process(target=hold, args=(tmp_path / "orders", told))
    giver.start()
    folder = Path(told.get())
    rank = threading.Thread(target=carry_out, args=(folder, []))
    rank.start()
    time.sleep(0.2)
    assert rank.is_alive(), "it ended while orders could still come"
    assert giver.pid
    os.kill(giver.pid, signal.SIGKILL)
    giver.join()
    rank.join(5)
    assert not rank.is_alive()
