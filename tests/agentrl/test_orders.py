"""Orders to ranks as files, over folders in which files are seen at once, late, or in another order."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.placement.shared import UnseenError, pause_s, sizes_of, wait_until_seen
from agentrl.training.orders import Orders, answer, arriving


def carry_out(folder: Path, seen: list[Any]) -> None:
    for path, order in arriving(folder, limit_s=20):
        seen.append(order)
        made = path.with_suffix(".made")
        made.write_text("of this order" * order["number"])
        answer(path, {"twice": 2 * order["number"]}, [made])


def test_orders_are_carried_out_in_turn_and_leave_nothing(tmp_path: Path) -> None:
    given = Orders(tmp_path / "orders", lambda: None, limit_s=20)
    seen: list[Any] = []
    rank = threading.Thread(target=carry_out, args=(given.folder, seen))
    rank.start()
    for number in (1, 5):
        with_it = given.file("rows")
        with_it.write_text("rows")
        assert given.give("double", [with_it], number=number)["twice"] == 2 * number
        assert given.answered("made").read_text() == "of this order" * number
    given.close()
    rank.join(5)
    assert not rank.is_alive()
    assert seen == [{"do": "double", "number": 1}, {"do": "double", "number": 5}]
    assert [path.name for path in given.folder.iterdir()] == ["000002.order"]


def test_nobody_waits_for_ranks_that_ended(tmp_path: Path) -> None:
    def ended() -> None:
        raise RuntimeError("the ranks ended")

    with pytest.raises(RuntimeError, match="the ranks ended"):
        Orders(tmp_path / "orders", ended, limit_s=20).give("double", number=1)


@contextmanager
def mirrored(left: Path, right: Path, late_s: float) -> Iterator[None]:
    """Files of each folder appear in the other one late, the larger ones last: two machines and their caches. Paths in
    the text of small files are changed too, as if both machines had the folder at the same path."""
    born: dict[tuple[str, str], float] = {}
    done: set[tuple[str, str]] = set()
    over = threading.Event()

    def copy(source: Path, target: Path) -> None:
        for file in [path for path in source.rglob("*") if path.is_file() and path.suffix != ".partial"]:
            name = str(file.relative_to(source))
            key, back = (str(source), name), (str(target), name)
            try:
                content = file.read_bytes()
            except FileNotFoundError:  # what was carried out is taken away
                continue
            large = len(content) > 500
            if (
                back in done
                or key in done
                or time.monotonic() - born.setdefault(key, time.monotonic()) < late_s + large
            ):
                continue
            done.add(key)
            copied = target / f"{name}.partial"
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(content.replace(str(source).encode(), str(target).encode()))
            copied.rename(target / name)

    def run() -> None:
        while not over.wait(0.05):
            copy(left, right)
            copy(right, left)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


def in_late_folders(folder: Path, late_s: float) -> None:
    left, right = folder / "a", folder / "b"
    right.mkdir()
    given = Orders(left / "orders", lambda: None, limit_s=20)
    (right / given.folder.relative_to(left)).mkdir(parents=True)
    seen: list[Any] = []
    with mirrored(left, right, late_s):
        rank = threading.Thread(target=carry_out, args=(right / given.folder.relative_to(left), seen))
        rank.start()
        for number in (100, 2):
            with_it = given.file("rows")
            with_it.write_text("rows " * 200)  # seen after the order that it goes with
            assert given.give("double", [with_it], number=number)["twice"] == 2 * number
            assert given.answered("made").read_text() == "of this order" * number
        given.close()
        rank.join(20)
        assert not rank.is_alive()
    assert len(seen) == 2


def test_files_that_are_seen_late_and_in_another_order_are_waited_for(tmp_path: Path) -> None:
    in_late_folders(tmp_path, 0.3)


@pytest.mark.slow
def test_files_that_are_seen_five_seconds_late_are_waited_for(tmp_path: Path) -> None:
    in_late_folders(tmp_path, 5.0)


def test_a_file_that_never_comes_or_is_shorter_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("short")
    with pytest.raises(UnseenError, match=r"rows \(9 bytes\) .* not seen here after 0.1 s; .*heartbeat_s"):
        wait_until_seen({str(tmp_path / "rows"): 9}, limit_s=0.1)
    wait_until_seen(sizes_of(tmp_path), limit_s=0.0)


def test_long_waits_look_once_a_second_and_short_ones_often() -> None:
    waited, looks = 0.0, 0
    while waited < 60:
        waited, looks = waited + pause_s(waited), looks + 1
    assert looks < 250, "6,000 at ten milliseconds"
    assert pause_s(0.1) <= 0.01
    assert pause_s(3600) == 1.0
