"""`agentrl cut`, and cuts in Python and in pipeline files."""

import json
import sys
from pathlib import Path

import pytest
from toy_project import Project

import agentrl
from agentrl.flows import cli

sys.path.append(str(Path(__file__).parents[1] / "datastore"))

from store_rows import build

RULES = """
rules:
  - {rule: filter, where: success}
  - {rule: keep, what: best}
licences: {mit: level < 2}
seed: 3
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> agentrl.Store:
    monkeypatch.chdir(tmp_path)
    store = agentrl.Store(tmp_path / "store")
    store.buffer.append([build(i) for i in range(16)], stage="rollout", fingerprint="f")
    (tmp_path / "r.yaml").write_text(RULES)
    return store


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.call(["cut", *arguments]) == code, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_cut_is_made_shown_verified_and_exported(
    store: agentrl.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "make", "gold", "--rules", "r.yaml")
    assert "4 rows of version 1; cut gold/" in text
    assert "which was there already" in said(capsys, "make", "gold", "--rules", "r.yaml")
    assert "mit" in said(capsys, "show", "gold")
    assert "gold: 4 rows and every file as they were; sha256 " in said(capsys, "verify", "gold")
    twin = json.loads(said(capsys, "make", "twin", "--rules", "r.yaml", "--json"))
    gold = json.loads(said(capsys, "show", "gold", "--json"))
    assert (twin["sha256"], twin["manifest"]) == (gold["sha256"], gold["manifest"])
    assert "both have the same rows" in said(capsys, "diff", "gold", "twin")
    assert [row["cut"][:5] for row in json.loads(said(capsys, "list", "--json"))] == ["gold/", "twin/"]
    assert "4 records of 4 rows written to out" in said(capsys, "export", "gold", "out")
    assert "out: 4 rows and every file as they were" in said(capsys, "verify", "out")
    (tmp_path / "out/README.md").write_text("")
    assert "1 files are not as they were written: README.md" in said(capsys, "verify", "out", code=1)
    assert "is there already" in said(capsys, "export", "gold", "out", code=2)
    assert "openai-chat cannot hold, of 4 rows: " in said(
        capsys, "export", "gold", "out", "--format", "openai-chat", "--force"
    )
    said(capsys, "export", "gold", "out", "--force")
    assert "4 rows appended, 0 were there; cut gold/" in said(
        capsys, "import", "out", "--name", "gold", "--store", "other"
    )
    assert "gold: 4 rows" in said(capsys, "verify", "gold", "--store", "other")
    assert "both have the same rows" in said(capsys, "diff", "out", "gold", "--store", "other")


def test_what_is_wrong_is_said(store: agentrl.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no artifact or tag 'none'" in said(capsys, "verify", "none", code=2)
    store.select("mine")
    assert "'mine' is no cut but made by trajectories.select; cuts: none" in said(capsys, "show", "mine", code=2)
    assert "'mine' is the name of a stage" in said(capsys, "make", "mine", "--rules", "r.yaml", code=2)
    (tmp_path / "bad.yaml").write_text("rules: []\nlicence: {mit: level = 0}\n")
    assert "bad.yaml does not hold rules" in said(capsys, "make", "gold", "--rules", "bad.yaml", code=2)


def test_a_cut_in_python(store: agentrl.Store, tmp_path: Path) -> None:
    selection = store.select("some", where="level = 1")
    gold = agentrl.cut("gold", tmp_path / "r.yaml", store=store, progress=False)
    some = store.cut("some_cut", {"rules": []}, selection=f"some/{selection.fingerprint}", progress=False)
    assert gold.contents.rows == gold.rows.collect().height == 4
    assert gold.contents.seed == 3
    assert gold.frame("funnel")["after"].to_list() == [8, 4]
    assert gold.verify().ok
    assert some.contents.origin[0].stage == "some"
    assert gold.diff(some).counts()["change"].unique().sort().to_list() == ["in", "out"]
    assert gold.dropped.collect().height == 12
    gold.export(tmp_path / "out")
    other = agentrl.Store(tmp_path / "other")
    taken = other.import_cut(tmp_path / "out", "gold", progress=False)
    assert taken.sha256 == gold.sha256 == store.cut("gold").sha256
    assert other.cuts()["cut"].to_list() == [f"gold/{taken.fingerprint[:8]}"]
    assert "4 rows, sha256" in gold._repr_html_()
    with pytest.raises(LookupError, match=r"is no cut but made by trajectories\.select"):
        store.cut("some")


def test_a_pipeline_pins_a_cut_and_its_plan_follows_the_rows(project: Project) -> None:
    store = agentrl.Store(project.folder / "store")
    store.buffer.append([build(i) for i in range(16)], stage="rollout", fingerprint="f")
    rules = [{"rule": "filter", "where": "success"}]
    first = store.cut("gold", {"rules": rules}, progress=False)
    reads = "name: reads\nstages:\n  s: {uses: trajectories.curate, inputs: {trajectories: CUT}, with: {rules: []}}\n"
    outcome = project.run(reads.replace("CUT", f"gold/{first.fingerprint[:8]}"))["s"]
    assert outcome.manifest.outputs["trajectories"].rows == 8
    assert project.plan(reads.replace("CUT", "gold/newest")).to_run == []
    same = store.cut("gold", {"rules": rules, "seed": 1}, progress=False)
    assert same.sha256 != first.sha256
    assert project.plan(reads.replace("CUT", "gold/newest")).to_run == [], "the rows are the same"
    fewer = store.cut("gold", {"rules": [*rules, {"rule": "cap", "n": 3}]}, progress=False)
    [step] = project.plan(reads.replace("CUT", "gold/newest")).to_run
    assert step.reasons == ["input gold changed"]
    assert project.run(reads.replace("CUT", "gold/newest"))["s"].manifest.outputs["trajectories"].rows == 3
    assert project.plan(reads.replace("CUT", f"gold/{first.fingerprint[:8]}")).to_run == []
    assert fewer.contents.rows == 3
    with pytest.raises(agentrl.SpecError, match="there is no cut 'golf' in the store; did you mean 'gold'\\?"):
        project.plan(reads.replace("CUT", "golf/newest"))
