"""A store that the viewer's tests ask about; a module whose store has more in it makes its own."""

from pathlib import Path

import pytest
from viewer_store import Browser, make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    return folder


@pytest.fixture(scope="module")
def browser(store: Path) -> Browser:
    return Browser(store)
