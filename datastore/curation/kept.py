"""Where evidence of data files is kept for later curations, and which of it is of no more use."""

from collections.abc import Collection
from pathlib import Path

from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

FOLDER = "evidence"
"""Below the store's working folder: <kernel>/<data file>/<rows>.arrow"""
OUTDATED = ("sketch-*-1",)
"""Kernels that no curation reads any more: sketches without odd ones."""


def kept_folder(storage: LocalStorage | S3Storage, shared: Path | None = None) -> Path:
    """Where evidence is kept. ``shared``: a folder that all workers see, where they do not see the store's own."""
    return (shared or storage.working_folder()) / FOLDER


def evidence_of_others(storage: LocalStorage | S3Storage, names: Collection[str]) -> list[Path]:
    """Folders of evidence of other data files than these, and of kernels that are no longer read."""
    kept = kept_folder(storage)
    folders = [folder for kernel in kept.glob("*") for folder in kernel.glob("*.parquet") if folder.name not in names]
    return sorted([*folders, *(folder for kernel in OUTDATED for folder in kept.glob(kernel))])
