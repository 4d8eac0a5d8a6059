"""What a sandbox is: files and limits in, output and an end out; and where there is none."""

import asyncio
import tarfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from sandboxed import HERE, SMALL, python

from agentrl.engines.blocking import blocking
from agentrl.sandbox import Bubblewrap, Docker, Sandbox, SandboxError, Unsafe, bubblewrap, cgroups
from agentrl.sandbox.run import archive


def test_a_folder_in_tmp_can_be_readable(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "data.txt").write_text("shown")
    sandbox = Bubblewrap(limits=SMALL, readable=(str(folder),))
    ran = blocking(sandbox.run(["/bin/sh", "-c", f"cat {folder}/data.txt; echo no > {folder}/data.txt"], {}))
    assert (ran.stdout, (folder / "data.txt").read_text()) == (b"shown", "shown")


def test_a_program_gets_its_files_and_gives_its_output_and_its_exit_code() -> None:
    source = """
        import sys
        print(open("folder/data.txt").read(), end="")
        print("complaint", file=sys.stderr)
        sys.exit(3)
    """
    files = {"main.py": textwrap.dedent(source).encode(), "folder/data.txt": "Zahl: ½\n".encode()}
    ran = blocking(HERE.run([HERE.python, "-I", "main.py"], files))
    assert (ran.code, ran.stdout.decode(), ran.stderr, ran.stopped) == (3, "Zahl: ½\n", b"complaint\n", None)
    assert not ran.ok


def test_every_run_starts_afresh() -> None:
    source = "import os; print(os.listdir('.')); open('left.txt', 'w').write('x')"
    assert [python(source).stdout for _ in range(2)] == [b"['main.py']\n"] * 2


def test_the_loop_goes_on_while_programs_run() -> None:
    async def beats() -> int:
        runs = [asyncio.create_task(HERE.run(["/bin/sleep", "0.5"], {})) for _ in range(4)]
        count = 0
        while not all(run.done() for run in runs):
            await asyncio.sleep(0.01)
            count += 1
        assert all(run.result().ok for run in runs)
        return count

    assert blocking(beats()) > 20


def test_a_missing_bubblewrap_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.check.cache_clear()
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        python("print(1)")


def test_without_a_sandbox_code_runs_only_by_the_word_unsafe() -> None:
    class Config(BaseModel):
        sandbox: Sandbox = Bubblewrap()

    assert isinstance(Config().sandbox, Bubblewrap)
    assert isinstance(Config.model_validate({"sandbox": "unsafe"}).sandbox, Unsafe)
    docker = Config.model_validate({"sandbox": {"type": "docker", "image": "mine"}}).sandbox
    assert isinstance(docker, Docker)
    with pytest.raises(ValidationError, match="'bubblewrap', 'docker', 'unsafe'"):
        Config.model_validate({"sandbox": "none"})


@pytest.mark.parametrize("path", ["/etc/passwd", "../up.txt", "a/../../b", "", "nul\0.txt"])
def test_files_lie_inside_the_folder(path: str) -> None:
    for box in (HERE, Unsafe()):
        with pytest.raises(ValueError, match="inside the folder"):
            blocking(box.run(["/bin/true"], {path: b""}))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-zé ]{1,8}(/[a-z]{1,8}){0,2}", fullmatch=True), st.binary(max_size=40), max_size=4
    )
)
def test_files_are_packed_as_they_are(files: dict[str, bytes]) -> None:
    with archive(files) as packed, tarfile.open(fileobj=packed) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == files  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("delegated", "result"), [("cpu memory pids", "user.slice/app.slice"), ("cpu", None)], ids=["delegated", "not"]
)
def test_cgroups_of_version_2_are_made_where_controllers_are_delegated(
    delegated: str, result: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of version 2 in a folder: it says where groups are made, not that a kernel keeps them."""
    own = tmp_path / "user.slice" / "app.slice" / "shell.scope"
    own.mkdir(parents=True)
    for folder, controllers in ((own, ""), (own.parent, delegated), (own.parent.parent, "cpu")):
        (folder / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / "self").write_text("0::/user.slice/app.slice/shell.scope\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "self")
    cgroups.places.cache_clear()
    try:
        assert cgroups.places() == ((tmp_path / result,) if result else ())
    finally:
        cgroups.places.cache_clear()
