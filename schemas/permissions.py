"""Who may read what is written."""

from pathlib import Path


def readable(folder: Path) -> None:
    """Let whoever may read a folder read the files in it: safetensors 0.8 leaves what it writes to its owner alone, so
    that colleagues and servers of another user could not load a model of a shared store."""
    allowed = folder.stat().st_mode & 0o444
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(file.stat().st_mode & 0o777 | allowed)
