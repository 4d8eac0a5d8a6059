"""Task files in SWE-bench's form (Jimenez et al. 2024), snapshots of repositories, and patches."""

import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


def _listed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_listed)]
"""Names of tests, in pytest's form; SWE-bench writes the list as JSON text."""


class Instance(BaseModel):
    """One line of a task file. Other columns are not read."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    instance_id: str
    repo: str = Field(description="owner/name")
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str = ""
    fail_to_pass: Names = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: Names = Field([], alias="PASS_TO_PASS")


def instances(path: Path) -> list[Instance]:
    """The instances of a JSON Lines file. Raises ValueError that names the line and what is wrong with it."""
    by_id: dict[str, Instance] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            instance = Instance.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from None
        if instance.instance_id in by_id:
            raise ValueError(f"{path}, line {number}: instance_id {instance.instance_id!r} is there twice")
        by_id[instance.instance_id] = instance
    return list(by_id.values())


def clone_of(repositories: Path, repo: str) -> Path:
    """The clone of a repository: ``owner/name``, ``owner__name`` or ``name`` in a folder. Raises ValueError if there is
    none."""
    tried = [repositories / name for name in (repo, repo.replace("/", "__"), repo.rpartition("/")[2])]
    for folder in tried:
        if (folder / ".git").exists() or (folder / "HEAD").exists():
            return folder
    raise ValueError(f"there is no clone of {repo} at {tried[0]}; git clone it there, or set `repositories`")


@lru_cache(maxsize=16)
def snapshot(repositories: Path, repo: str, commit: str) -> Mapping[str, str]:
    """The files of a commit; what is no UTF-8 keeps its bytes as surrogates. Links are the files that they lead to.

    Raises ValueError if the clone has no such commit.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{7,64}", commit):
        raise ValueError(f"base_commit {commit!r} of {repo} is no commit")
    folder = clone_of(repositories, repo)
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "archive", "--format=tar", commit]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{folder} has no commit {commit}: {done.stderr.decode().strip()}; fetch it")
    files: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        for member in tar:
            try:
                content = tar.extractfile(member) if not member.isdir() else None
            except KeyError:  # a link that leads out of the repository
                continue
            if content:
                files[member.name] = content.read().decode("utf-8", "surrogateescape")
    return files


def patched(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """The files after a unified diff, as ``git apply`` applies it. Raises ValueError if it does not fit."""
    if not patch.strip():
        return dict(files)
    named = set(re.findall(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", patch, re.M))
    named |= set(re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", patch, re.M))
    with tempfile.TemporaryDirectory() as folder:
        for path in named & set(files):
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(files[path].encode("utf-8", "surrogateescape"))
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = subprocess.run(command, cwd=folder, input=patch.encode(), capture_output=True, check=False)
        if done.returncode:
            raise ValueError(f"the patch does not fit: {done.stderr.decode().strip()}")
        after = {path: text for path, text in files.items() if path not in named}
        for file in Path(folder).rglob("*"):
            if file.is_file():
                content = file.read_bytes().decode("utf-8", "surrogateescape")
                after[str(file.relative_to(folder))] = content
    return after
