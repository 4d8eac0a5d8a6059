"""The card of a data set, README.md: what the hub reads of it, and what people do."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.datastore.cuts.annotations import NOTHING, Written
from agentrl.schemas.cut import UNKNOWN_LICENCE, CutManifest

_LICENCES = """
apache-2.0 mit openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 lgpl-lr isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma unknown other
"""
ON_THE_HUB = frozenset(_LICENCES.split())
"""Licences that the hub knows; a data set under another one says ``other``, with the name beside it."""

_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
)
"""Sizes as the hub names them: the first whose number is above the rows counts."""


def card(
    name: str,
    manifest: CutManifest,
    identity: str,
    format: str,
    files: str | None,
    records: int,
    loses: Mapping[str, int],
    tasks_left_out: Mapping[str, int],
    labels: Written = NOTHING,
) -> str:
    """README.md of an exported cut. ``files`` is the pattern of the data files that the hub can load, if it can;
    ``tasks_left_out`` counts the tasks that were not written since they hold secrets, by how that is known, and
    ``labels`` what is written of annotations."""
    from huggingface_hub import DatasetCardData

    licences = sorted({source.licence for source in manifest.sources}) or [UNKNOWN_LICENCE]
    size = next((size for below, size in _SIZES if records < below), "n>1T")
    data = DatasetCardData(
        license=_one_or_list([licence if licence in ON_THE_HUB else "other" for licence in licences]),
        license_name=_one_or_list([licence for licence in licences if licence not in ON_THE_HUB]),
        pretty_name=name,
        task_categories=["text-generation"],
        size_categories=[size],
        tags=["agentrl", "agent", "trajectories", "tool-use"],
        configs=_configs(files, labels),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        _what(manifest, format, records, loses),
        "## How it was made",
        _made(manifest),
        "## Sources and licences",
        _sources(manifest),
        "## Evaluation sets",
        _evaluated(manifest),
        "## Secrets",
        _secrets(manifest) + _left_out(tasks_left_out),
        *_annotated(labels),
        "## How to check it",
        _checking(identity),
    ]
    return "\n\n".join(parts) + "\n"


def _one_or_list(names: Sequence[str]) -> Any:
    unique = list(dict.fromkeys(names))
    return (unique[0] if len(unique) == 1 else unique) if unique else None


def _configs(files: str | None, labels: Written) -> list[dict[str, Any]] | None:
    """The tables that the hub shows: the rows, and what was said of them."""
    rows = [{"config_name": "default", "data_files": files}] if files else []
    said_of_them = [{"config_name": "annotations", "data_files": labels.file}] if labels.given else []
    pairs = [{"config_name": "pairs", "data_files": labels.pairs_file}] if labels.pairs else []
    return rows + said_of_them + pairs or None


def _annotated(labels: Written) -> list[str]:
    """The section on annotations; nothing if there are none."""
    left_out = " ".join(f"{count:,} annotations were left out, {why}." for why, count in labels.left_out.items())
    if not labels.given:
        return ["## Annotations", left_out] if left_out else []
    text = (
        f"`{labels.file}` has what people and judges said of the rows, by `trajectory_id`, with what they said before: "
        "of one author, one name and one target the newest `created_at` counts. The cut does not vouch for it.\n\n"
    )
    if labels.pairs:
        text += (
            f"`{labels.pairs_file}` names the preferred and the other row of each pair that some of it is about.\n\n"
        )
    lines = [(each.name, each.author_kind, f"{each.annotations:,}", f"{each.rows:,}") for each in labels.given]
    table = _table(("name", "by", "annotations", "rows"), lines)
    return ["## Annotations", text + table + (f"\n\n{left_out}" if left_out else "")]


def _what(manifest: CutManifest, format: str, records: int, loses: Mapping[str, int]) -> str:
    counts = manifest.counts
    text = (
        f"{manifest.rows:,} trajectories of agents at {counts.tasks:,} tasks: {counts.successes:,} succeeded, "
        f"{counts.failures:,} failed, {counts.unscored:,} are unscored; {counts.steps:,} steps, {counts.tool_calls:,} "
        f"calls of tools, {counts.tokens:,} tokens, of which a policy sampled {counts.action_tokens:,}.\n\n"
        f"`data/` holds {records:,} records in the format `{format}`."
    )
    if loses:
        lost = ", ".join(f"{what} ({count:,} rows)" for what, count in loses.items())
        text += f" The format cannot hold: {lost}."
    return text


def _made(manifest: CutManifest) -> str:
    origin = [f"{part.rows:,} rows of `{part.stage}.{part.output}`, digest `{part.digest}`" for part in manifest.origin]
    given = f"from {'; '.join(origin)}, " if origin else ""
    text = (
        f"Cut {given}from version {manifest.table.version} of table `{manifest.table.id}`, with seed {manifest.seed}, "
        "by these rules in this order:\n\n"
    )
    return text + _table(
        ("rule", "rows before", "rows after"),
        [(f"`{level.rule}`", f"{level.before:,}", f"{level.after:,}") for level in manifest.funnel],
    )


def _sources(manifest: CutManifest) -> str:
    rows = [
        (
            source.licence,
            source.source,
            source.stage,
            source.env,
            source.model,
            f"{source.rows:,}",
            f"{source.tokens:,}",
        )
        for source in manifest.sources
    ]
    unknown = sum(source.rows for source in manifest.sources if source.licence == UNKNOWN_LICENCE)
    unlicensed = f"\n\nNobody said under which licence {unknown:,} rows are." if unknown else ""
    return _table(("licence", "source", "stage", "environment", "model", "rows", "tokens"), rows) + unlicensed


def _evaluated(manifest: CutManifest) -> str:
    held = manifest.heldout
    text = (
        f"Held out were {held.rows:,} rows of split {', '.join(held.splits)} in version {held.version} of the table, "
        f"digest `{held.digest}`, which `cut/heldout.parquet` names."
        if held
        else ""
    )
    if not manifest.evaluation_sets:
        return text or "The rows were not compared with any evaluation set."
    rows = [
        (
            each.name,
            f"{each.questions:,}",
            f"`{each.digest}`",
            str(each.ngram),
            f"{each.overlap:g}",
            f"{each.dropped:,}",
        )
        for each in manifest.evaluation_sets
    ]
    heads = ("set", "questions", "digest", "words of an n-gram", "share of them", "rows dropped")
    compared = "Rows that hold a question of these sets were dropped:\n\n" + _table(heads, rows)
    return f"{compared}\n\n{text}" if text else compared


def _secrets(manifest: CutManifest) -> str:
    redacted = f"In {manifest.counts.redacted:,} rows placeholders such as `<EMAIL_1>` stand for secrets. "
    if manifest.secrets is None:
        return redacted + "Nobody looked for secrets that are left."
    if manifest.secrets.unread:
        redacted += f"The tokens of {manifest.secrets.unread:,} rows were not searched: nobody knows what they say. "
    if not manifest.secrets.rows:
        return redacted + "A search for keys, passwords, mail addresses, phone numbers, hosts and users found no other."
    places = ", ".join(f"{kind} {count:,}" for kind, count in manifest.secrets.places.items())
    return redacted + f"A search for secrets found some in {manifest.secrets.rows:,} rows: {places}."


def _left_out(counts: Mapping[str, int]) -> str:
    """A sentence on the tasks that do not lie beside the rows; nothing if all do."""
    parts = ", ".join(f"{count:,} {why}" for why, count in counts.items())
    return f" Tasks that were left out, since they hold secrets: {parts}." if parts else ""


def _checking(identity: str) -> str:
    return (
        f"The SHA-256 of `cut/cut.json` is `{identity}`. It vouches for `cut/rows.parquet`, which has the digest of "
        "each row, and for `cut/dropped.parquet`, which has every row that was not taken, with the rule that dropped "
        "it. `sha256sum -c checksums.txt` checks the files; `agentrl cut verify FOLDER` checks the rows too."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
