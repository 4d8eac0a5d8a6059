"""Parsing while another thread may parse: planning beside Prefect's threads, calculators of episodes side by side."""

import ast
import gc
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.schemas.syntax import expression_tree, module_tree

SOURCE = Path(ast.__file__).read_text()


def parsed_deeper(depth: int) -> None:
    if depth:
        parsed_deeper(depth - 1)
    else:
        ast.parse("1")


@pytest.fixture
def frequent_collections() -> Iterator[None]:
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_collections")
def test_a_parse_that_another_interrupts_is_made_again() -> None:
    interrupts = []

    def interrupt(phase: str, _: object) -> None:
        if phase == "start" and len(interrupts) < 2:
            interrupts.append(phase)
            parsed_deeper(20)

    gc.callbacks.append(interrupt)
    try:
        if sys.version_info < (3, 12):
            with pytest.raises(SystemError, match="recursion depth mismatch"):
                ast.parse(SOURCE)
            interrupts.clear()
        tree = module_tree(SOURCE)
    finally:
        gc.callbacks.remove(interrupt)
    assert len(interrupts) == 2
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))


@pytest.mark.usefixtures("frequent_collections")
def test_threads_parse_side_by_side() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            time.sleep(0)  # lets another thread go on

    first = threading.Barrier(4)

    def parse(depth: int) -> str:
        if depth:
            return parse(depth - 1)
        first.wait()
        for _ in range(10):
            Cycle()
            tree = module_tree(SOURCE)
        return ast.dump(tree)

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(parse, (0, 5, 10, 15))) == {ast.dump(ast.parse(SOURCE))}


def test_errors_are_those_of_python() -> None:
    with pytest.raises(SyntaxError):
        module_tree("def")
    with pytest.raises(SyntaxError):
        expression_tree("x = 1")
