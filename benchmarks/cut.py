"""A cut that one can trust: what redaction leaves, how well the audit of rewards finds hacks, and what a cut shows.

    python benchmarks/cut.py [PART ...]              all parts, or those named
    SCALE=small python benchmarks/cut.py redaction   a tenth of the rows
    CHECK=1 python benchmarks/cut.py                 exit code 1 if a target is missed
    ROWS=1000000 python benchmarks/cut.py text       searches of as many rows as their target names (100,000 without)

Each part is a function of this module that is named in ``PARTS``; it prints its lines by :func:`line`.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentrl.datastore import TrajectoryBuffer
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl import Cut, Store

SMALL = os.environ.get("SCALE") == "small"
missed: list[str] = []


def line(figure: str, value: float, unit: str = "", least: float | None = None, most: float | None = None) -> None:
    """Print a figure, and whether it is at least, or at most, its target."""
    target = least if least is not None else most
    verdict = ""
    if target is not None:
        met = value >= target if least is not None else value <= target
        verdict = f" (target {'at least' if least is not None else 'at most'} {target:g}): {'met' if met else 'MISSED'}"
        if not met:
            missed.append(figure)
    print(f"{figure}: {value:,.4g}{' ' * bool(unit)}{unit}{verdict}", flush=True)


def redaction() -> None:
    """1,000 secrets of 26 kinds in 10,000 rows: what is left, what is touched, and the time, beside detect-secrets."""
    from agentrl.datastore.artifacts.tokenizers import keep
    from agentrl.datastore.redaction.rows import RowRedaction
    from agentrl.datastore.storage.object_store import LocalStorage
    from benchmarks.planted_secrets import KINDS, planted_rows, texts_of, tokenizer

    rows, planted = planted_rows(1_000 if SMALL else 10_000, 104 if SMALL else 1_000, seed=1)
    dirty = {each.row for each in planted}
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        keep(storage, "chatml-4000", tokenizer().to_str)
        cleaner = RowRedaction(storage)
        started = time.process_time()
        cleaned = [cleaner.clean(row) for row in rows]
        ours = time.process_time() - started
    left: Counter[str] = Counter()
    for each in planted:
        once = json.dumps(each.secret)[1:-1]
        forms = (each.secret, once, json.dumps(once)[1:-1])
        left[each.kind] += any(form in text for text in texts_of(cleaned[each.row].row) for form in forms)
    touched = sum(result.changed for number, result in enumerate(cleaned) if number not in dirty)
    line(f"secrets of {len(KINDS)} kinds that are left, of {len(planted):,}", sum(left.values()), most=0)
    for kind in (kind for kind, number in left.items() if number):
        line(f"  of them {kind}", left[kind])
    line(
        f"clean rows that are touched, of {len(rows) - len(dirty):,}",
        100 * touched / (len(rows) - len(dirty)),
        "%",
        most=1,
    )
    line("texts, JSON and tokens: rows a CPU second", len(rows) / ours)
    _beside_detect_secrets(rows[: 60 if SMALL else 200], {each.row: each.secret for each in planted})


def _beside_detect_secrets(rows: list[Trajectory], secrets: dict[int, str]) -> None:
    """detect-secrets alone, with all of its plugins and filters, line by line over the same messages."""
    from detect_secrets.core.scan import scan_line
    from detect_secrets.settings import default_settings

    from agentrl.datastore.redaction.detect import Detectors
    from agentrl.datastore.redaction.settings import EVERYTHING

    texts = [
        [message.content + "".join(f"\n{call.arguments}" for call in message.tool_calls) for message in row.messages]
        for row in rows
    ]

    def theirs() -> list[list[str]]:
        return [
            [each.secret_value or "" for text in row for part in text.splitlines() for each in scan_line(part)]
            for row in texts
        ]

    def ours() -> list[list[str]]:
        detect = Detectors(EVERYTHING)
        return [[text[hit.start : hit.end] for text in row for hit in detect(text)] for row in texts]

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    given: dict[str, list[list[str]]] = {}
    with default_settings():
        for _ in range(3):
            for name, find in (("ours", ours), ("theirs", theirs)):
                started = time.process_time()
                given[name] = find()
                times[name].append(time.process_time() - started)
    ratio = statistics.median(times["theirs"]) / statistics.median(times["ours"])
    held = {number: secret for number, secret in secrets.items() if number < len(rows)}
    for name, values in given.items():
        seen = sum(any(part and (part in held[n] or held[n] in part) for part in values[n]) for n in held)
        clean = sum(bool(values[n]) for n in range(len(rows)) if n not in held)
        line(f"detection alone, {name}: secrets seen, of {len(held)}", seen)
        line(f"detection alone, {name}: clean rows with a detection, of {len(rows) - len(held)}", clean)
    line("time of detect-secrets over ours, on the same texts", ratio, "x", least=1)


def rewards() -> None:
    """Twelve kinds of hack among honest rows: precision and recall of the audit, by kind."""
    from agentrl.doctor.audit import audit_rewards, stateful_envs
    from benchmarks.planted_hacks import HACKS, as_row, sets, single_rows

    planted = single_rows(8 if SMALL else 20, 16 if SMALL else 40)
    rows = [as_row(each.row) for each in planted]
    started = time.process_time()
    audit = audit_rewards(rows, {}, stateful_envs((row["env"], row["final_state"] != "null") for row in rows))
    line(f"audit of {len(rows):,} rows: rows a CPU second", len(rows) / (time.process_time() - started))
    truth = {each.row.trajectory_id: each.kind for each in planted}
    flagged = {(suspicion.kind, suspicion.trajectory_id) for suspicion in audit.suspicions}
    for kind in HACKS:
        _precision_and_recall(
            kind,
            hits=sum(truth[name] == kind for named, name in flagged if named == kind),
            flagged=sum(named == kind for named, _ in flagged),
            planted=sum(of == kind for of in truth.values()),
        )
    honest = [name for name, kind in truth.items() if kind is None]
    wrong = {name for _, name in flagged} & set(honest)
    line(f"honest rows with a suspicion, of {len(honest)}", len(wrong))
    together = [
        (each.kind, {finding.name for finding in audit_rewards(map(as_row, each.rows), {}, frozenset()).together})
        for each in sets(2 if SMALL else 10)
    ]
    for kind in sorted({kind for kind, _ in together if kind}):
        _precision_and_recall(
            f"{kind} (sets of 128 rows)",
            hits=sum(of == kind and kind in named for of, named in together),
            flagged=sum(kind in named for _, named in together),
            planted=sum(of == kind for of, _ in together),
        )


def _precision_and_recall(kind: str, hits: int, flagged: int, planted: int) -> None:
    line(f"{kind}: precision, of {flagged} flagged", hits / flagged if flagged else 0.0, least=0.9)
    line(f"{kind}: recall, of {planted} planted", hits / planted, least=0.8)


def cuts() -> None:
    """20,000 rows of about 500 tokens: cuts made twice, rows that were changed, a difference, a data set, an import."""
    import psutil
    from datasets import load_dataset
    from huggingface_hub import DatasetCard

    import agentrl
    from benchmarks.buffer_data import make

    count = 2_000 if SMALL else 20_000
    rules = [{"rule": "filter", "where": "success"}, {"rule": "exact_duplicates"}]
    with tempfile.TemporaryDirectory() as folder:
        store, other = (agentrl.Store(f"{folder}/{name}") for name in ("store", "other"))
        for first in range(0, count, 2_000):
            store.buffer.append(make(2_000, first), stage="rollout", fingerprint="a" * 32, shard=first)
        started, memory = time.process_time(), psutil.Process().memory_info().rss
        gold = store.cut("gold", rules, progress=False)
        line(f"a cut of {count:,} rows: processor time", time.process_time() - started, "s")
        line("memory that it added", (psutil.Process().memory_info().rss - memory) / 2**20, "MiB")
        twin = store.cut("twin", rules, progress=False)
        pairs = [(path, twin.folder.path / path.name) for path in gold.folder.path.iterdir()]
        unlike = sum(path.read_bytes() != same.read_bytes() for path, same in pairs)
        line(f"files of {len(pairs)} that differ in a second cut by the same rules", unlike, most=0)
        started = time.process_time()
        line("rows that differ when verified", len(gold.verify().problems()), most=0)
        line("verified: rows a CPU second", gold.contents.rows / (time.process_time() - started))
        line("rows that were changed and are not named, of 100", 100 - _changed_rows_named(gold, other), most=0)
        fewer = store.cut("fewer", [*rules, {"rule": "cap", "n": gold.contents.rows // 2}], progress=False)
        gone = gold.diff(fewer).rows
        explained = gone.filter(gone["rule"].str.starts_with("cap")).height
        line("rows of a difference with the rule that made it", 100 * explained / gone.height, "%", least=100)
        started = time.process_time()
        gold.export(f"{folder}/out")
        line("exported as Parquet: rows a CPU second", gold.contents.rows / (time.process_time() - started))
        about = DatasetCard.load(f"{folder}/out/README.md").data.to_dict()
        loaded = load_dataset(f"{folder}/out", split="train", cache_dir=f"{folder}/cache")
        line("rows of the data set that `datasets` lacks", gold.contents.rows - loaded.num_rows, most=0)
        line("configurations that its card names", len(about["configs"]), least=1)
        taken = agentrl.Store(f"{folder}/third").import_cut(f"{folder}/out", "gold", progress=False)
        line("cuts imported into another store that are another cut", taken.sha256 != gold.sha256, most=0)
        line("rows that differ there", len(taken.verify().problems()), most=0)


def _changed_rows_named(gold: "Cut", other: "Store") -> int:
    """How many of 100 rows that were changed are named when another store with them is verified."""
    from agentrl.datastore.cuts.verify import verify

    ids = gold.folder.ids()[:100].to_pylist()
    rows = TrajectoryBuffer(gold.catalog.storage.uri).get_many(ids)
    changed = [row.model_copy(update={"final_state": "0"}) for row in rows]
    other.buffer.append(changed, stage="changed", fingerprint="b" * 32)
    return len(set(ids) & set(verify(other.buffer, gold.folder).changed))


def text() -> None:
    """How long a search for words takes, and how large its index is."""
    from benchmarks import fulltext

    fulltext.main()
    missed.extend(fulltext.missed)


PARTS: dict[str, Callable[[], None]] = {"redaction": redaction, "rewards": rewards, "cuts": cuts, "text": text}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    for name in names:
        print(f"# {name}", flush=True)
        PARTS[name]()
    if missed and os.environ.get("CHECK"):
        sys.exit(f"{len(missed)} targets missed")


if __name__ == "__main__":
    main()
