"""What the buffer page shows, saved as a selection with a name."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
from typer.testing import CliRunner
from viewer_store import Browser, make_store, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.cli import app, call
from agentrl.flows.viewer.guard import Door
from agentrl.flows.viewer.pages import saving
from agentrl.flows.viewer.processes import Told
from agentrl.flows.viewer.reader import StoreReader
from agentrl.pipelines.results.gc import BY_COMMAND, find_garbage
from agentrl.pipelines.run.execute import open_output
from agentrl.schemas.manifest import InputRecord

KEY = "the-key"
ALLOWED = {"x-agentrl-key": KEY}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def writer(store: Path) -> Browser:
    return Browser(store, Door("127.0.0.1", 8322, write=True, key=KEY))


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, which has imported everything already, unless the test is a slow one."""

    def command(arguments: Sequence[str], patience: float) -> Told:
        result = CliRunner().invoke(app, list(arguments))
        if result.exit_code:
            return Told({}, (result.stderr or str(result.exception)).strip().rpartition("error: ")[2])
        return Told(json.loads(result.stdout))

    if "slow" not in request.keywords:
        monkeypatch.setattr(saving, "told_by", command)


def saved(writer: Browser, status: int = 200, **question: Any) -> Any:
    answer: httpx.Response = writer.ask("/api/selection", "POST", headers=ALLOWED, body={"name": "mine", **question})
    assert answer.status_code == status, answer.text
    return answer.json()


def ids_of(store: Path, artifact: str) -> list[str]:
    name, _, beginning = artifact.partition("/")
    [manifest] = [manifest for manifest in Catalog(store).manifests(name) if manifest.fingerprint.startswith(beginning)]
    record = InputRecord(stage=name, output="trajectories", fingerprint=manifest.fingerprint)
    handle = open_output(record, Catalog(store), TrajectoryBuffer(store))
    return list(handle.ids())  # type: ignore[attr-defined]


def test_a_filter_is_saved_by_a_name_with_its_version(writer: Browser, store: Path) -> None:
    wanted = writer.arrow("/api/rows", filter="success", at="1", sort="trajectory_id", desc="false")
    told = saved(writer, filter="success", at="1")
    rows = pl.DataFrame(wanted)
    assert (told["rows"], told["version"], told["again"], told["before"]) == (rows.height, 1, False, [])
    assert told["other_splits"] == (rows["split"] != "train").sum() > 0
    assert ids_of(store, told["artifact"]) == rows["trajectory_id"].to_list()
    [manifest] = Catalog(store).manifests("mine")
    config = manifest.ingredients.config
    assert (config["where"], config["version"], config["split"]) == ("success", 1, None)
    assert (manifest.run_id, manifest.ingredients.uses) == (BY_COMMAND, "trajectories.select")
    assert "mine" not in [artifact.ingredients.stage for artifact in find_garbage(Catalog(store), 0).artifacts]
    shown = writer.json("/api/facets", among=told["artifact"])
    assert shown["filtered"] == rows.height
    assert told["wiring"] == f"inputs: {{trajectories: {told['artifact']}}}"


def test_what_was_saved_under_a_name_stays(writer: Browser, store: Path) -> None:
    first = saved(writer, filter="success")
    assert saved(writer, filter="success") == first | {"again": True}
    second = saved(writer, filter="not success")
    assert (second["again"], second["before"]) == (False, [first["artifact"]])
    assert set(ids_of(store, first["artifact"])).isdisjoint(ids_of(store, second["artifact"]))
    assert len(Catalog(store).manifests("mine")) == 2
    assert writer.json("/api/facets", among=first["artifact"])["filtered"] == first["rows"]


def test_rows_that_no_filter_names_are_saved_too(writer: Browser, store: Path) -> None:
    """Rows that were selected, and a part of a part; each exactly."""
    chosen = [row(number).trajectory_id for number in (7, 2)]
    assert sorted(ids_of(store, saved(writer, ids=chosen)["artifact"])) == sorted(chosen)
    whole = saved(writer, filter="level <> 1")
    part = saved(writer, name="part", among=whole["artifact"], filter="success")
    rows = pl.DataFrame(writer.arrow("/api/rows", filter="success and level <> 1"))
    assert sorted(ids_of(store, part["artifact"])) == sorted(rows["trajectory_id"])
    old = saved(writer, name="old", among=whole["artifact"], at="1")
    assert old["rows"] + old["absent"] == whole["rows"]
    assert old["absent"] > 0


@pytest.mark.parametrize(
    ("question", "status", "message"),
    [
        ({"filter": "reward > 5"}, 400, "no row"),
        ({"filter": "level in (select 1)"}, 400, "select"),
        ({"ids": ["nobody"]}, 404, "nobody"),
        ({"name": "grpo"}, 409, "name of a stage"),
        ({"name": "kept"}, 409, "is a tag"),
        ({"name": "../up"}, 400, "name"),
        ({"name": "--help"}, 400, "name"),
        ({"name": ""}, 400, "name"),
        ({"name": "a" * 81}, 400, "name"),
        ({"among": "none/00000000"}, 404, "no artifact"),
        ({"rule": "x"}, 400, "artifact"),
        ({"at": "99"}, 404, "no version"),
        ({"shell": "ls"}, 400, "shell"),
        ({"ids": ["x" * 20_000] * 4}, 413, "bytes"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_writes_nothing(
    writer: Browser, store: Path, question: dict[str, Any], status: int, message: str
) -> None:
    Catalog(store).tag("kept", "warm", "b" * 32)
    before = sorted(store.rglob("artifacts/*"))
    assert message in saved(writer, status, **question)["error"]
    assert sorted(store.rglob("artifacts/*")) == before


def test_what_no_file_can_hold_is_refused_with_its_field(writer: Browser) -> None:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=writer.app)) as client:
            body = b'{"name": "mine", "ids": ["a", "b\\ud800"]}'
            return await client.post(
                "http://127.0.0.1:8322/api/selection",
                headers={**ALLOWED, "content-type": "application/json"},
                content=body,
            )

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["field"]) == (400, "ids.1")
    assert "half of a surrogate pair" in answer.json()["error"]


def test_without_write_nothing_is_saved(store: Path) -> None:
    answer = Browser(store).ask("/api/selection", "POST", headers=ALLOWED, body={"name": "mine"})
    assert (answer.status_code, answer.json()["next"]) == (405, "agentrl view --write")
    assert Browser(store).ask("/api/selection", "GET").status_code == 404
    forged = Browser(store, Door("127.0.0.1", 8322, write=True)).ask(
        "/api/selection", "POST", headers=ALLOWED, body={"name": "mine"}
    )
    assert forged.status_code == 403


def test_a_filter_that_a_query_reads_in_another_way_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a later Polars read expressions and queries differently."""
    snapshot = StoreReader(str(store)).tables.at(None)
    real = saving.sql.matching
    monkeypatch.setattr(saving.sql, "matching", lambda rows, where, *rest: real(rows, f"not ({where})", *rest))
    with pytest.raises(saving.RefusedError, match="other rows"):
        saving._same_in_queries(snapshot, "success")


@pytest.mark.slow
def test_a_pipeline_curates_what_a_page_saved(writer: Browser, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the real command, in a process of its own; a pipeline names the selection."""
    told = saved(writer, filter="level > 0")
    file = store.parent / "p.yaml"
    file.write_text(
        f"""
name: p
stages:
  curated: {{uses: trajectories.curate, {told["wiring"]}, with: {{rules: [{{rule: filter, where: success}}]}}}}
"""
    )
    assert call(["run", str(file), "--store", str(store)]) == 0, capsys.readouterr().err
    [manifest] = Catalog(store).manifests("curated")
    rows = pl.DataFrame(writer.arrow("/api/rows", filter="level > 0 and success and split = 'train'"))
    assert sorted(ids_of(store, f"curated/{manifest.fingerprint}")) == sorted(rows["trajectory_id"])
    assert manifest.ingredients.inputs["trajectories"][0].stage == "mine"
