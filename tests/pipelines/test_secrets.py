"""Secrets stay out of logs, records and manifests, however they are written."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_project import Project

from agentrl.flows import cli
from agentrl.pipelines import secrets
from agentrl.pipelines.run.execute import job_of
from agentrl.pipelines.run.worker import StageError, Workers
from agentrl.pipelines.secrets import StreamRedactor, redacted, shown_setting, without_userinfo

TELLS = """
import os, subprocess, sys, time, warnings
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, Secret, StageConfig, reveal, stage
import pyarrow as pa

class Config(StageConfig):
    url: str = ""
    key: Secret
    end: str = ""

@stage("tells.all", version=1)
def tell(context: Context, config: Config) -> Table:
    print("before anything was revealed:", os.environ["JUDGE"], flush=True)
    key = reveal(config.key)
    os.write(1, f"written to the descriptor: {key}\\n".encode())
    os.write(2, key[:7].encode())
    time.sleep(0.3)  # the rest comes in another piece
    os.write(2, (key[7:] + " in two pieces\\n").encode())
    subprocess.run(["sh", "-c", "echo by a program: $JUDGE $OTHER_TOKEN"])
    print(f"asked {config.url}, which did not answer")
    warnings.warn(f"{config.url} is slow")
    context.metrics["asked"] = config.url
    if config.end == "fail":
        raise ValueError(f"no answer from {config.url}")
    if config.end == "die":
        os.write(1, f"last words {key} ".encode())
        os.kill(os.getpid(), 9)
    return context.table(pa.table({"x": [1]}))
"""
PIPELINE = 'name: p\nstages: {t: {uses: "tells:tell", with: {key: "${JUDGE}", url: "URL", end: "END"}}}'
URL = "https://ann:pa55-word@judge.example/v1?q=1"
KEPT = (b"kE7-very", b"y-secret", b"tOk-also", b"pa55-word", b"ann:")


@pytest.fixture
def told(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("JUDGE", "kE7-very-secret")  # its name says nothing, its field does
    monkeypatch.setenv("OTHER_TOKEN", "tOk-also-a-secret")
    (project.folder / "tells.py").write_text(TELLS)
    return project


def nowhere(folder: Path) -> None:
    """No file below the folder but the pipeline's own holds a secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "pipeline.yaml"]
    assert not [(path, text) for path in files for text in KEPT if text in path.read_bytes()]


def test_what_a_stage_writes_without_python_is_redacted_in_its_log(told: Project) -> None:
    log = told.folder / "t.log"
    workers = Workers(lambda *_: None)
    try:
        plan = told.plan(PIPELINE.replace("URL", URL).replace("END", "die"))
        with pytest.raises(StageError, match="was killed"):
            workers.run(job_of(plan.steps["t"], plan, "r"), log)
    finally:
        workers.close()
    lines = log.read_text().splitlines()
    assert lines[0] == "before anything was revealed: ***"
    for line in ("written to the descriptor: ***", "*** in two pieces", "by a program: *** ***", "last words *** "):
        assert line in lines
    assert "asked https://***:***@judge.example/v1?q=1, which did not answer" in lines
    nowhere(told.folder)


@pytest.mark.parametrize("end", ["", "fail"])
def test_user_and_password_of_an_url_are_in_no_record(
    told: Project, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    told.write(PIPELINE.replace("URL", "http://ann:pa55-word@first.example").replace("END", end))
    arguments = ["--store", "store", "--set", f"stages.t.with.url={URL}"]
    assert cli.call(["run", "pipeline.yaml", *arguments]) == bool(end)
    printed = capsys.readouterr()
    for command in (["plan", "pipeline.yaml", "--store", "store"], ["runs", "--json"], ["show", "last", "--json"]):
        cli.call([*command, *(["--store", "store"] if command[0] != "plan" else [])])
    printed = [printed.out, printed.err, *capsys.readouterr()]
    assert not [text for text in KEPT for entry in printed if text.decode() in entry]
    nowhere(told.folder)


def test_a_password_in_an_url_changes_no_fingerprint_and_its_host_does(told: Project) -> None:
    def fingerprint(url: str) -> str:
        return told.plan(PIPELINE.replace("URL", url).replace("END", "")).steps["t"].fingerprint

    assert fingerprint(URL) == fingerprint(URL.replace("pa55-word", "next-word"))
    assert fingerprint(URL) != fingerprint(URL.replace("judge.example", "other.example"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pass@host/x", "http://***:***@host/x"),
        ("https://token@host", "https://***@host"),
        ("s3://key:a@b@bucket/x", "s3://***:***@bucket/x"),
        ("http://host/x@y", "http://host/x@y"),
        ("http://host:80/?mail=a@b.c", "http://host:80/?mail=a@b.c"),
        ("write to http://a:b@c, please", "write to http://a:b@c, please"),
        ("ann@example.org", "ann@example.org"),
    ],
)
def test_what_of_an_url_is_hidden(url: str, shown: str) -> None:
    assert without_userinfo(url) == shown
    assert shown_setting(f"stages.a.with.url={url}") == f"stages.a.with.url={redacted(url)}"


SECRETS = ("abcabcd", "abcabcdefg", "cabcab", 's3cr"t\\ with spaces')
PIECES = st.lists(
    st.sampled_from(
        [*SECRETS, *(secret[:4] for secret in SECRETS), "abc", " ", "http://u:p@h", "http:", "//", "x@", "é\n"]
    )
)


@given(PIECES, st.lists(st.integers(0, 200)))
def test_pieces_are_redacted_as_the_whole_is(words: list[str], cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_revealed", set(SECRETS))
        text = "".join(words)
        whole = text.encode()
        places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        stream = StreamRedactor()
        shown = [stream.feed(whole[start:end]) for start, end in itertools.pairwise(places)]
        assert (b"".join(shown) + stream.end()).decode() == redacted(text)
        assert "abcabcd" not in redacted(text)
