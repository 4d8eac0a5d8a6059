"""The command as a tree: every command has --json, every option is declared once, errors are one line and a code."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from toy_project import make_project

from agentrl.datastore.storage import credentials
from agentrl.flows import cli

ROOT = Path(__file__).parents[2]


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in (group or typer.main.get_command(cli.app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
            if command.invoke_without_command:  # as `view`, which has `export` beside what it does itself
                yield path + name, command
        else:
            yield path + name, command


def test_every_command_has_json_and_a_help_of_one_sentence_or_more() -> None:
    result = dict(commands())
    assert len(result) > 30
    for name, command in result.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name
        assert command.help, name


OF_ANOTHER_KIND = {
    "--force": ["view export", "buffer export", "cut export"],  # a file is replaced, no stage run again
    "--set": ["replay"],
    "--split": ["buffer import"],
    "--format": ["buffer export", "cut export"],
    "--from": ["cut make"],  # a selection, no stage
    "--name": ["cut import"],
    "--text": ["buffer index"],  # which index, no words to find
}
"""Commands in which an option means something else than in the others that have it, and says so."""


def parameters() -> Iterator[tuple[str, Any, Any]]:
    for name, command in commands():
        for parameter in command.params:
            if parameter.name != "help":
                yield name, command, parameter


def test_every_help_is_of_its_own_command() -> None:
    """No argument is left unsaid, no text speaks of an option that the command does not have, nor of a stage in a
    command that takes no pipeline."""
    for name, _, parameter in parameters():
        assert parameter.help, f"{parameter.opts[0]} of {name}"
        assert not parameter.help.endswith("."), f"{parameter.opts[0]} of {name}"
    for name, command in commands():
        options = {option for parameter in command.params for option in parameter.opts}
        texts = [command.help, *(parameter.help for parameter in command.params if parameter.name != "help")]
        for text in texts:
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
            assert named <= options, f"{name}: {text}"
            assert "``" not in text, f"{name} shows marks of reStructuredText: {text}"
        assert command.help.endswith("."), name


def test_an_option_that_means_something_else_says_so() -> None:
    helps = {(parameter.opts[0], name): parameter.help for name, _, parameter in parameters()}
    for option, names in OF_ANOTHER_KIND.items():
        others = {text for (key, name), text in helps.items() if key == option and name not in names}
        assert others
        for name in names:
            assert helps[option, name] not in others, f"{option} of {name}"


def test_every_option_that_several_commands_share_is_declared_once() -> None:
    """Two commands that declare an option of one name each on their own come to differ, sooner or later."""
    seen: dict[str, tuple[str, Any]] = {}
    for name, _, parameter in parameters():
        if parameter.param_type_name != "option":
            continue
        described = (parameter.help, sorted(parameter.opts), parameter.envvar)
        kind = parameter.opts[0] + " of files" * (name in OF_ANOTHER_KIND.get(parameter.opts[0], ()))
        first, expected = seen.setdefault(kind, (name, described))
        assert described == expected, f"{parameter.opts[0]} of {name} and of {first}"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "No such command"),
        (["plan"], 2, "Missing argument 'file'; see `agentrl plan --help`"),
        (["plan", "quickstart", "--nonsense"], 2, "No such option: --nonsense; see `agentrl plan --help`"),
        (["plan", "quickstart", "--store", ""], 2, "is empty; give a folder or s3://bucket/prefix"),
        (["plan", "quickstart", "--store", " "], 2, "is empty"),
        (["runs", "--limit", "0"], 2, "greater than or equal to 1"),
        (["buffer", "stats"], 2, "there is no trajectory buffer at"),
        (["buffer", "show", "\x1b[31mred"], 2, "there is no trajectory buffer at"),
        (["show", "\x1b]0;x\x07"], 2, r"\x1b]0;x\x07"),
        (["validate", "\x9b31m.yaml"], 2, r"\x9b31m.yaml"),
        (["buffer", "import", "nothing.jsonl", "-f", "atif"], 2, "there is nothing to import at nothing.jsonl"),
    ],
)
def test_errors_are_one_line_without_control_characters(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.call(arguments) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "\x1b" not in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


OF_A_STORE = {
    "run": ["run", "quickstart"],
    "plan": ["plan", "quickstart"],
    "validate": ["validate", "quickstart"],
    "status": ["status", "quickstart"],
    "schedule": ["schedule", "quickstart", "--cron", "0 2 * * *"],
    "show": ["show", "last"],
    "diff": ["diff", "a", "b"],
    "compare": ["compare", "eval"],
    "lineage": ["lineage", "warm"],
    "tag": ["tag", "best", "warm"],
    "gc": ["gc", "--keep-runs", "3"],
    "doctor": ["doctor", "grpo"],
    "dialect": ["dialect", "warm"],
    "generate": ["generate", "--model", "warm", "--prompt", "hi"],
    "view export": ["view", "export", "true", "rows.html"],
    "recordings show": ["recordings", "show", "recorded-0-0"],
    "recordings release": ["recordings", "release", "recorded-0-0"],
    "replay": ["replay", "grpo", "--step", "0"],
    "buffer query": ["buffer", "query", "select 1"],
    "buffer search": ["buffer", "search", "boss"],
    "buffer show": ["buffer", "show", "x"],
    "buffer diff": ["buffer", "diff", "1"],
    "buffer experience": ["buffer", "experience", "boss"],
    "buffer curate": ["buffer", "curate", "rules.yaml"],
    "buffer select": ["buffer", "select", "hard-ones"],
    "buffer sample": ["buffer", "sample", "3"],
    "buffer tokenizer": ["buffer", "tokenizer", "model"],
    "buffer import": ["buffer", "import", "chat.jsonl"],
    "buffer export": ["buffer", "export", "out.jsonl", "-f", "openai-chat"],
    "cut make": ["cut", "make", "gold", "--rules", "rules.yaml"],
    "cut show": ["cut", "show", "gold"],
    "cut verify": ["cut", "verify", "gold"],
    "cut diff": ["cut", "diff", "gold", "silver"],
    "cut export": ["cut", "export", "gold", "out"],
    "cut import": ["cut", "import", "out", "--name", "gold"],
    "buffer forget": ["buffer", "forget", "0123456789abcdef"],
    "buffer annotate": ["buffer", "annotate", "chat.jsonl"],
    "buffer agreement": ["buffer", "agreement", "thumbs"],
}
"""How to call commands that need arguments."""


STORE_COMMANDS = [name for name, item in commands() if any("--store" in p.opts for p in item.params)]


@pytest.mark.parametrize("name", [name for name in STORE_COMMANDS if name != "check-cluster"])  # it refuses buckets
def test_a_bucket_without_credentials_is_said_with_the_next_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", *credentials._ROLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "rules.yaml").write_text("rules: [{rule: keep}]")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert cli.call([*OF_A_STORE.get(name, name.split()), "--store", "s3://bucket/team"]) == 2
    errors = capsys.readouterr().err
    assert (
        "store 's3://bucket/team' cannot be used: there are no credentials for S3: export AWS_ACCESS_KEY_ID" in errors
    )
    assert len(errors.splitlines()) == 1


def test_machines_share_no_bucket(capsys: Any) -> None:
    assert cli.call(["check-cluster", "quickstart", "--store", "s3://bucket/team"]) == 2
    assert "--store s3://bucket/team: machines share a folder" in capsys.readouterr().err


@pytest.mark.parametrize("at", ["", "x", "-1", "9" * 30, "9" * 5000, "9999-12-31", "0001-01-01", "٣", "1e3", "\x1b[2J"])
def test_any_at_is_a_version_a_time_or_refused(at: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["stats"], ["query", "select 1"], ["diff"]):
        given = [*command, at] if command == ["diff"] else [*command, "--at", at]
        assert cli.call(["buffer", *given]) == 2
        assert "\x1b" not in capsys.readouterr().err


def test_output_survives_an_encoding_that_lacks_its_characters(tmp_path: Path) -> None:
    code = (
        "import sys; from agentrl.flows.cli import main\n"
        "sys.argv = ['agentrl', 'validate', 'h\\u00f6h\\U0001f600.yaml']; main()"
    )
    env = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert r"h\xf6h\U0001f600.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m agentrl.flows.cli schema pipeline | head -1"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_stages_lists_the_library_with_an_example_each(capsys: Any) -> None:
    from agentrl.pipelines.file.library import builtin_stages
    from agentrl.schemas.pipeline import StageSpec

    assert cli.call(["stages", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["stage"] for entry in listed] == sorted(builtin_stages())
    assert all(entry["about"] for entry in listed)
    for name, stage in builtin_stages().items():
        assert cli.call(["stages", name, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert list(printed["inputs"]) == list(stage.inputs)
        assert list(printed["outputs"]) == list(stage.outputs)
        assert [field["field"] for field in printed["config"]] == list(stage.config.model_fields)
        [entry] = printed["example"].values()
        assert StageSpec.model_validate(entry).uses == name
        assert cli.call(["stages", name]) == 0
        assert f"uses: {name}" in capsys.readouterr().out
    assert cli.call(["stages", "train.stf"]) == 2
    assert "did you mean 'train.sft'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a b", "ü-ß", "\U0001f600", 'it\'s "quoted"', "[x]{y}(z)", "%20", "#a?b&c=d", "-rf"])
def test_pipeline_files_lie_in_folders_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    made = make_project(folder)
    path = made.write("name: p\nstages: {a: {uses: 'toy:numbers'}, b: {uses: 'toy:add', inputs: {tables: a}}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "child.yaml").write_text("name: c\nextends: pipeline.yaml\n")
    for file in (path, folder / "child.yaml"):
        assert cli.call(["validate", str(file)]) == 0
        assert cli.call(["plan", str(file), "--store", str(folder / "store"), "--json"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("store", ["/dev/full/store", "/proc/nowhere/store", "/dev/null"])
def test_a_store_that_cannot_be_written_is_one_line(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert cli.call(["buffer", "import", "rows.jsonl", "--store", store]) in (1, 2)
    assert cli.call(["run", "quickstart", "--no-prefect", "--store", store]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of each call of agentrl that a page shows."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*\$ agentrl (.*)", line):
                yield page.name, match[1]


def test_pages_show_commands_and_options_that_exist() -> None:
    known, shown = dict(commands()), list(shown_commands())
    assert len(shown) > 25
    for page, line in shown:
        words = line.partition(" # ")[0].split()
        named = [name for name in (" ".join(words[:2]), words[0]) if name in known]
        assert named, f"{page}: agentrl {line}"
        params = known[named[0]].params
        options = {option for parameter in params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            assert not word.startswith("--") or word.partition("=")[0] in options, f"{page}: agentrl {line}"
