"""Packages that Arrow imports and that a worker does not need."""

import sys

import pyarrow as pa


def spare_pandas() -> None:
    """Make the first array of this process as if pandas were not installed. Arrow imports it otherwise, in a third of a
    second, to tell its arrays from lists. Later, `pa.array` takes a Series of pandas for a list: NaN in it is no null.
    So this is not for processes in which code of users runs."""
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([""])
    finally:
        sys.meta_path.remove(_NoPandas)


class _NoPandas:
    """A finder of modules that says there is no pandas, and leaves all others to other finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("is not needed here", name=name)
