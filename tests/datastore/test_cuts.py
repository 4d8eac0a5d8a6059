"""Cuts: made by rules with digests, verified, compared, written as data sets, taken into other stores."""

import json
import subprocess
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import build

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.cuts.card import card
from agentrl.datastore.cuts.diff import NOT_GIVEN, diff
from agentrl.datastore.cuts.export import export_cut
from agentrl.datastore.cuts.folder import CutFolder
from agentrl.datastore.cuts.make import sha256
from agentrl.datastore.cuts.verify import verify, verify_export
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.cut import cut, import_cut
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.arrow import to_table
from agentrl.schemas.cut import question_digest
from agentrl.schemas.task import TASK_SCHEMA, Task

RULES: dict[str, Any] = {
    "rules": [{"rule": "filter", "where": "success"}, {"rule": "keep", "what": "best"}],
    "licences": {"mit": "level = 0", "cc-by-4.0": "level = 1"},
    "evaluation_sets": {"held": {"split": "heldout"}},
}


def rows(count: int = 40) -> list[Any]:
    return [build(i, split="heldout" if i % 5 == 0 else "train") for i in range(count)]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    harness = Harness(tmp_path)
    harness.trajectories(rows())
    return harness


def made(harness: Harness, settings: dict[str, Any] = RULES, **inputs: Any) -> CutFolder:
    version = {} if "trajectories" in inputs else {"version": harness.buffer.version}
    return CutFolder(harness.run(cut, {**version, **settings}, **inputs)["cut"].path)


def test_a_cut_says_how_it_came_about(harness: Harness) -> None:
    folder = made(harness)
    manifest = folder.manifest
    funnel = [(level.rule.split()[0], level.before, level.after) for level in manifest.funnel]
    assert funnel == [("split", 40, 32), ("filter", 32, 16), ("keep", 16, 10), ("evaluation", 10, 10)]
    ids = folder.ids().to_pylist()
    assert len(ids) == manifest.rows == 10
    assert manifest.digest == harness.buffer.digest(ids)
    assert ids == sorted(ids)
    dropped = dict(folder.dropped().collect().rows())
    assert sorted([*dropped, *ids]) == [row.trajectory_id for row in rows()]
    assert dropped[build(0).trajectory_id] == "split train"
    assert manifest.table.version == 1
    assert manifest.counts.model_dump() == {
        "tasks": 10, "episodes": 10, "steps": 20, "tool_calls": 10, "tokens": 120, "action_tokens": 60,
        "successes": 10, "failures": 0, "unscored": 0, "redacted": 0,
    }  # fmt: skip
    levels = [int(name.rpartition("-")[2]) % 3 for name in ids]
    licences = {source.licence: source.rows for source in manifest.sources}
    assert licences == {"mit": levels.count(0), "cc-by-4.0": levels.count(1), "unknown": levels.count(2)}
    [held] = manifest.evaluation_sets
    assert (held.name, held.questions, held.dropped) == ("held", 8, 0)
    rows_held = [build(i).trajectory_id for i in range(0, 40, 5)]
    assert manifest.heldout is not None
    assert (manifest.heldout.version, manifest.heldout.splits, manifest.heldout.rows) == (1, ["heldout"], 8)
    assert manifest.heldout.digest == harness.buffer.digest(sorted(rows_held))


def test_rows_that_hold_a_question_of_an_evaluation_set_are_dropped(harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps({"question": f"boss of Ann {i}?"}) + "\n" for i in (1, 7, 1000)))
    sets = {"evaluation_sets": {"bench": {"file": str(path), "column": "question"}}}
    tasks = harness.tasks([Task(task_id="h", env="lookup", split="heldout", prompt="boss of Ann 9?")])
    folder = made(harness, RULES | sets, heldout=[tasks])
    bench, given = folder.manifest.evaluation_sets
    assert (bench.name, bench.questions, bench.dropped) == ("bench", 3, 2)
    assert (given.name, given.questions, given.dropped) == (f"{tasks.stage}.tasks", 1, 1)
    assert folder.manifest.rows == 7
    rules = dict(folder.dropped().collect().rows())
    assert rules[build(7).trajectory_id] == "evaluation set bench"
    with pytest.raises(StoreError, match=r"bench.jsonl:1 has no text under 'prompt'; it has question"):
        made(harness, {"evaluation_sets": {"bench": {"file": str(path)}}})
    with pytest.raises(StoreError, match="has no row of split 'other'"):
        made(harness, {"evaluation_sets": {"bench": {"split": "other"}}})


def test_the_same_rules_on_the_same_version_give_the_same_bytes(harness: Harness) -> None:
    near = {"rules": [{"rule": "near_duplicates", "threshold": 0.99, "scope": "all"}, {"rule": "cap", "n": 9}]}
    for settings in (RULES, near):
        first, second = (made(harness, settings) for _ in range(2))
        names = sorted(path.name for path in first.path.iterdir())
        held = ["heldout.parquet"] if settings is RULES else []
        assert names == ["cut.json", "dropped.parquet", *held, "rows.parquet"]
        for name in names:
            assert (first.path / name).read_bytes() == (second.path / name).read_bytes()
        assert first.identity == second.identity
    version = harness.buffer.version
    harness.trajectories([build(100)])
    assert made(harness, {**RULES, "version": version}).identity != first.identity
    assert made(harness, {**near, "version": version}).identity == first.identity
    harness.seed = 1
    assert made(harness, {**near, "version": version}).identity != first.identity


def test_a_cut_of_a_selection_takes_its_rows_alone(harness: Harness) -> None:
    chosen = harness.trajectories([build(i) for i in range(100, 108)])
    folder = made(harness, {"rules": [{"rule": "filter", "where": "success"}]}, trajectories=[chosen])
    assert folder.ids().to_pylist() == [build(i).trajectory_id for i in range(101, 108, 2)]
    [origin] = folder.manifest.origin
    assert (origin.rows, origin.digest) == (8, harness.buffer.digest(chosen.ids()))
    with pytest.raises(ValueError, match=r"with\.version is null"):
        harness.run(cut, {})


def test_rows_that_changed_or_are_gone_are_named(harness: Harness, tmp_path: Path) -> None:
    folder = made(harness)
    assert verify(harness.buffer, folder).as_dict() == {
        "identity": folder.identity, "rows": 10, "missing": [], "changed": [], "files": [], "beyond": [], "heldout": [],
        "ok": True,
    }  # fmt: skip
    other = TrajectoryBuffer(tmp_path / "other")
    ids = folder.ids().to_pylist()
    changed = harness.buffer.get_many(ids[2:])
    changed[0] = changed[0].model_copy(update={"final_state": '{"other": 1}'})
    other.append(changed, stage="x", fingerprint="x")
    checked = verify(other, folder)
    assert (checked.missing, checked.changed) == (ids[:2], ids[2:3])
    assert not checked.ok
    assert checked.problems()[0] == f"2 rows are missing: {ids[0]}, {ids[1]}"
    with pytest.raises(StoreError, match="is not what it was, and was not exported: 2 rows are missing"):
        export_cut(other, folder, "gold", tmp_path / "gold")
    assert not (tmp_path / "gold").exists()
    (folder.path / "rows.parquet").write_bytes((folder.path / "dropped.parquet").read_bytes())
    assert verify(harness.buffer, folder).files == ["rows.parquet"]


def test_a_difference_says_by_which_rule(harness: Harness) -> None:
    first = made(harness)
    second = made(
        harness, RULES | {"rules": [{"rule": "filter", "where": "success"}, {"rule": "keep", "what": "first"}]}
    )
    between = diff(first, second)
    assert between.rows.is_empty()
    third = made(harness, RULES | {"rules": [{"rule": "filter", "where": "not success"}]})
    between = diff(first, third)
    counts = {(change, rule.split()[0]): count for change, rule, count in between.counts().rows()}
    assert counts == {("in", "filter"): 16, ("out", "filter"): 10}
    assert between.why == [
        'rule gone: {"rule": "filter", "where": "success"}',
        'rule gone: {"n": 1, "rule": "keep", "what": "best"}',
        'rule new: {"rule": "filter", "where": "not success"}',
    ]
    version = harness.buffer.version
    harness.trajectories([build(101)])
    later = diff(made(harness, RULES | {"version": version}), made(harness))
    assert later.rows.rows() == [(build(101).trajectory_id, "in", NOT_GIVEN)]
    assert later.why == ["table version 1 -> 2"]


def exported(harness: Harness, path: Path, format: str = "parquet", **options: Any) -> Path:
    export_cut(harness.buffer, made(harness), "gold", path, format, **options)
    return path


def test_an_export_is_a_data_set_that_others_load_and_check(harness: Harness, tmp_path: Path) -> None:
    from huggingface_hub import DatasetCard

    harness.buffer.keep_tasks(_tasks())
    path = exported(harness, tmp_path / "gold")
    done = subprocess.run(["sha256sum", "-c", "--quiet", "checksums.txt"], cwd=path, check=False)
    assert done.returncode == 0
    assert sorted(p.name for p in path.iterdir()) == [
        "README.md", "checksums.txt", "cut", "data", "tasks.parquet",
    ]  # fmt: skip
    read = DatasetCard.load(path / "README.md")
    about = read.data.to_dict()
    assert about["license"] == ["cc-by-4.0", "mit", "unknown"]
    assert about["configs"] == [{"config_name": "default", "data_files": "data/*.parquet"}]
    assert about["size_categories"] == ["n<1K"]
    assert "| `filter where=success` | 32 | 16 |" in read.text
    assert made(harness).identity in read.text
    taken = pq.read_table(path / "data")
    assert pl.DataFrame(taken).equals(pl.DataFrame(harness.buffer.read(made(harness).ids())))
    assert verify_export(path).ok
    with pytest.raises(StoreError, match="is there already; --force replaces it"):
        exported(harness, path)
    again = exported(harness, tmp_path / "again")
    for file in path.rglob("*.*"):
        if file.is_file():
            assert file.read_bytes() == (again / file.relative_to(path)).read_bytes()


def _tasks() -> Any:
    return to_table([Task(task_id="t0", env="lookup", split="train", prompt="boss of Ann 1?")], TASK_SCHEMA)


def test_a_cut_names_the_annotations_that_its_rules_read(harness: Harness) -> None:
    thumbs = [
        Annotation(trajectory_id=build(number).trajectory_id, name="thumbs", value="up", author="ann")
        for number in (1, 2, 3)
    ]
    version = harness.buffer.annotations.append(thumbs).version
    settings = {"rules": [{"rule": "annotated", "name": "thumbs", "version": version}]}
    folder = made(harness, settings)
    assert folder.ids().to_pylist() == [each.trajectory_id for each in thumbs]
    [used] = folder.manifest.annotations
    assert (used.name, used.version, used.annotations) == ("thumbs", version, 3)
    harness.buffer.annotations.append([thumbs[0].model_copy(update={"annotation_id": "later"})])
    assert made(harness, settings).identity == folder.identity, "the version of the annotations is pinned"


def test_secrets_are_counted_or_refused(harness: Harness) -> None:
    pytest.importorskip("detect_secrets")
    harness.trajectories([build(101, prompt="mail jane.roe@northwind.io"), build(103, tags=["redacted"])])
    assert made(harness).manifest.secrets is None
    manifest = made(harness, {"secrets": "report"}).manifest
    assert manifest.secrets is not None
    assert (manifest.secrets.rows, manifest.secrets.places, manifest.counts.redacted) == (1, {"EMAIL": 1}, 1)
    text = card("gold", manifest, "f" * 64, "parquet", None, 1, {}, {})
    assert "In 1 rows placeholders" in text
    assert "found some in 1 rows: EMAIL 1." in text
    with pytest.raises(StoreError, match=f"1 rows hold secrets .EMAIL 1.: {build(101).trajectory_id}; nothing was wr"):
        made(harness, {"secrets": "refuse"})


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.write])
def test_every_format_is_exported(harness: Harness, tmp_path: Path, format: str) -> None:
    (cut_folder,) = [made(harness, {"rules": []})]
    done = export_cut(harness.buffer, cut_folder, "gold", tmp_path / "gold", format)
    assert done.rows == 32
    assert done.records
    checked = verify_export(tmp_path / "gold")
    assert (checked.ok, checked.rows) == (True, 0)
    (tmp_path / "gold/README.md").write_text("other")
    (tmp_path / "gold/more").write_text("more")
    assert verify_export(tmp_path / "gold").files == ["README.md", "more"]
    with pytest.raises(StoreError, match="does not hold the rows as they are"):
        harness.run(import_cut, {"path": str(tmp_path / "gold")})


def test_a_cut_is_taken_into_another_store(harness: Harness, tmp_path: Path) -> None:
    harness.buffer.keep_tasks(_tasks())
    path = exported(harness, tmp_path / "gold")
    other = Harness(tmp_path / "other")
    other.trajectories([harness.buffer.get(made(harness).ids()[0].as_py())])
    done = other.run(import_cut, {"path": str(path)})
    assert (done.metrics["appended"], done.metrics["known"]) == (9, 1)
    taken = CutFolder(done["cut"].path)
    assert taken.identity == made(harness).identity == done.metrics["sha256"]
    assert done["trajectories"].ids() == taken.ids().to_pylist()
    assert verify(other.buffer, taken).ok
    assert len(other.buffer.tasks(["t0"])) == 1
    again = other.run(import_cut, {"path": str(path)})
    assert (again.metrics["appended"], again.metrics["known"]) == (0, 10)


def test_what_was_tampered_with_is_not_taken(harness: Harness, tmp_path: Path) -> None:
    path = exported(harness, tmp_path / "gold")
    data = path / "data/rows-00000.parquet"
    forged = pl.read_parquet(data).with_columns(reward=pl.lit(1.0) - pl.col("reward")).to_arrow()
    pq.write_table(forged.cast(pq.read_schema(data)), data)
    other = Harness(tmp_path / "other")
    with pytest.raises(StoreError, match=r"is not the cut that was exported: 1 files .*: data/rows-00000.parquet"):
        other.run(import_cut, {"path": str(path)})
    lines = (path / "checksums.txt").read_text().splitlines()
    digest = subprocess.check_output(["sha256sum", "data/rows-00000.parquet"], cwd=path, text=True).split()[0]
    lines = [f"{digest}  {line[66:]}" if "rows-00000" in line else line for line in lines]
    (path / "checksums.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(StoreError, match="10 rows have other content"):
        other.run(import_cut, {"path": str(path)})
    assert other.buffer.version is None
    clash = Harness(tmp_path / "clash")
    row = harness.buffer.get(made(harness).ids()[0].as_py())
    clash.trajectories([row.model_copy(update={"final_state": "1"})])
    with pytest.raises(StoreError, match="1 rows of this store have ids of rows of the cut, and other content"):
        clash.run(import_cut, {"path": str(exported(harness, path, force=True))})


def summed(path: Path) -> None:
    """Write the checksums of an export anew, as anybody can."""
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256(path / name)}  {name}\n" for name in names if name != "checksums.txt"]
    (path / "checksums.txt").write_text("".join(lines))


def test_what_is_beyond_the_cut_is_not_taken(harness: Harness, tmp_path: Path) -> None:
    path = exported(harness, tmp_path / "gold")
    data = path / "data/rows-00000.parquet"
    more = pl.read_parquet(data).head(1).with_columns(trajectory_id=pl.lit("evil")).to_arrow()
    schema = pq.read_schema(data)
    pq.write_table(pa.concat_tables([pq.read_table(data), more.cast(schema)]), data)
    task = Task(task_id="t999", env="lookup", split="train", prompt="boss of Eve?")
    pq.write_table(to_table([task], TASK_SCHEMA), path / "tasks.parquet")
    (path / "tokenizers").mkdir()
    for name in ("tok", "other"):
        (path / f"tokenizers/{name}.json").write_text("{}")
    summed(path)
    assert verify_export(path).beyond == ["data: evil", "tasks.parquet: t999", "tokenizers/other.json"]
    other = Harness(tmp_path / "other")
    with pytest.raises(StoreError, match="3 rows, tasks, tokenizers or annotations are beyond the cut: data: evil, "):
        other.run(import_cut, {"path": str(path)})
    assert other.buffer.version is None
    assert not len(other.buffer.tasks(["t999"]))


def test_tasks_with_secrets_are_left_out(harness: Harness, tmp_path: Path) -> None:
    pytest.importorskip("detect_secrets")
    harness.trajectories([build(101, task_id="cleaned", tags=["redacted"]), build(103, task_id="keyed")])
    key = "ghp_" + "a1B2" * 9
    tasks = [
        Task(task_id="cleaned", env="lookup", split="train", prompt="mail jane.roe@northwind.io"),
        Task(task_id="keyed", env="lookup", split="train", prompt="which key?", ground_truth=f'"{key}"'),
    ]
    harness.buffer.keep_tasks(to_table(tasks, TASK_SCHEMA))
    harness.buffer.keep_tasks(_tasks())
    redacted, searched = "of rows in which placeholders stand for secrets", "in which a search found secrets"
    for secrets, kept, left_out in (
        (None, ["keyed", "t0"], {redacted: 1}),
        ("refuse", ["t0"], {redacted: 1, searched: 1}),
    ):
        path = tmp_path / f"gold-{secrets}"
        done = export_cut(harness.buffer, made(harness, {"rules": [], "secrets": secrets}), "gold", path)
        assert done.tasks_left_out == left_out
        assert pq.read_table(path / "tasks.parquet")["task_id"].to_pylist() == kept
        text = (path / "README.md").read_text()
        assert all(f"{count} {why}" in text for why, count in left_out.items())


def test_a_split_is_recorded_by_the_questions_that_rows_are_compared_with(harness: Harness) -> None:
    harness.trajectories([build(number, split="test", prompt="") for number in (100, 200)])
    [recorded] = made(harness, {"evaluation_sets": {"asked": {"split": "test"}}}).manifest.evaluation_sets
    asked = ["boss of Ann 100?", "boss of Ann 200?"]
    assert (recorded.questions, recorded.digest) == (2, question_digest(asked))


def test_a_version_that_lacks_rows_of_the_selection_is_refused(harness: Harness) -> None:
    version, new = harness.buffer.version, harness.trajectories([build(100), build(101)])
    lacking = f"selection: version {version} of the buffer lacks 2 of 2 rows: {new.ids()[0]}"
    with pytest.raises(StoreError, match=lacking):
        made(harness, {"version": version}, trajectories=[new])


def test_the_card_names_licences_as_the_hub_does(harness: Harness) -> None:
    from huggingface_hub import DatasetCard

    manifest = made(harness, {"licences": {"My Own": "level < 9"}}).manifest
    about = DatasetCard(card("gold: 1", manifest, "f" * 64, "atif", None, 5_000, {"token ids": 3}, {})).data.to_dict()
    assert (about["license"], about["license_name"], about["pretty_name"]) == ("other", "My Own", "gold: 1")
    assert about["size_categories"] == ["1K<n<10K"]
    assert "configs" not in about


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_sets": {"a": {}}}, "needs file or split"),
        ({"evaluation_sets": {"a": {"split": "x", "column": "y"}}}, "column does nothing with split"),
        ({"licences": {"mit": "levle = 0"}}, "did you mean 'level'"),
        (
            {"version": None, "evaluation_sets": {"a": {"split": "x"}}},
            r"evaluation_sets\.a names a split .* set version",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut.config.model_validate({"version": 1, **settings})
