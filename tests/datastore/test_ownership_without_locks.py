"""A store on a file system without locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.ownership import mark


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", absent)
    with pytest.raises(StoreError, match=r"has no locks \(Function not implemented\).*mount it with locks"):
        mark(tmp_path / "working")
