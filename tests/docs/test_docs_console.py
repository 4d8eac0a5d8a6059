"""How what a page shows is compared with what is printed."""

from pathlib import Path

import pytest
from console_run import Shell, commands, difference
from page_blocks import blocks
from run_blocks import run


def test_commands_go_on_in_quotes_and_behind_backslashes() -> None:
    text = '$ a "b\n   c"\none\n$ d \\\n  e\n\n$ f   # a comment\' \n'
    assert commands(text) == [('a "b\n   c"', ["one"]), ("d \\\n  e", []), ("f   # a comment' ", [])]
    assert commands("no command\n$ a\n") == [("", ["no command"]), ("a", [])]


@pytest.mark.parametrize(
    ("shown", "printed", "figures"),
    [
        ("run 20261121-220248-3ef9: 4 stages ran", "run 20261124-111111-0a0b: 4 stages ran", True),
        ("12:00:01  [1/2] a: done in 27 s", "13:10:44  [1/2] a: done in 1 min 2.5 s", True),
        ("x  0.836", "x     0.900", False),
        ("a", "12:00:00  [1/4] a: started\na\nstore   /tmp/x/store", True),
        ("a\n...\nd e ... g", "a\nb\nc\nd e f g", True),
        ("row expert-51826613-000135", "row expert-0abc1234-000135", True),
    ],
)
def test_what_differs_between_runs_is_no_difference(shown: str, printed: str, figures: bool) -> None:
    assert difference(shown.split("\n"), printed.split("\n"), figures) == ""


@pytest.mark.parametrize(
    ("shown", "printed", "message"),
    [
        ("x 0.836", "x 0.9", "shown   x 0.836\nprinted x 0.9"),
        ("a\nb", "a", "shown   b\nprinted (nothing more)"),
        ("a", "a\nerror: b", "printed, and not shown: error: b"),
        ("a\n...\nd", "a\nb", "shown   d\nprinted (nothing more)"),
        ("4 stages ran", "5 stages ran", "shown   4 stages ran\nprinted 5 stages ran"),
    ],
)
def test_what_is_not_shown_or_not_printed_is_a_difference(shown: str, printed: str, message: str) -> None:
    assert difference(shown.split("\n"), printed.split("\n")) == message


def test_a_shell_keeps_its_variables_and_its_jobs(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    try:
        assert shell.run("export A=3; touch b", []) == []
        assert shell.run("echo $A; ls; cat", []) == ["3", "b"]
        assert shell.run("(sleep 0.2; echo late; sleep 60) &", ["late"]) == ["late"]
        assert shell.run("false", []) == []
        assert shell.status == 1
    finally:
        shell.close()


def test_python_blocks_share_names_and_say_what_is_wrong() -> None:
    names: dict[str, object] = {}
    assert run("x = 3", names) == ""
    assert run(">>> x + 1\n4\n>>> y = 5\n", names) == ""
    assert run(">>> y\n6\n", names).endswith("Expected:\n    6\nGot:\n    5\n")
    assert "NameError: name 'z' is not defined" in run("z", names)


def test_blocks_know_their_files_and_their_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "`a/b.py`:\n\n```python\nx = 1\n```\n\n<!-- block: not run, needs a GPU -->\n```console\n$ c\n```\n\n"
        "Save this as `d.yaml`. It is short.\n\n```yaml\nname: d\n```\n\n```\n$ e\n```\n\n```\ntext\n```\n"
    )
    result = list(blocks(page))
    assert [block.file for block in result] == ["a/b.py", "", "d.yaml", "", ""]
    assert [block.reason for block in result] == ["", "needs a GPU", "", "", ""]
    assert [block.language for block in result] == ["python", "console", "yaml", "console", "text"]
