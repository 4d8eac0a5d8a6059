"""Commands that choose rows of the buffer: search, index, experience, curate, select, sample."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.flows.commands._common import fail, open_buffer, print_rows
from agentrl.flows.commands.buffer_read import version
from agentrl.flows.options import At, Best, DryRun, Embedder, Json, Name, Rows, Seed, ShardsBy, Store, Where, command
from agentrl.flows.terminal import console, say, say_json
from agentrl.schemas.installation import install_hint

if TYPE_CHECKING:
    from agentrl.datastore.curation.rules import Rules
    from agentrl.schemas.manifest import Manifest

app = typer.Typer()


@command(app)
def search(
    text: Annotated[str, typer.Argument(help='What the task is about; with --text: words "a phrase" -not')],
    store: Store = "store",
    k: Best = 5,
    where: Where = None,
    method: Annotated[
        str,
        typer.Option(
            help="dense (by the embedder), lexical (BM25), or hybrid (both, weighed by what they are worth: a neural "
            "embedder more than the buffer's own words)"
        ),
    ] = "hybrid",
    diverse: Annotated[float | None, typer.Option(min=0, max=1, help="MMR: 1 is relevance alone")] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="At most this many rows of one task")] = None,
    embedder: Embedder = None,
    in_messages: Annotated[
        bool, typer.Option("--text", help="Find words in messages, reasoning, tool calls and tool answers, by BM25")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the trajectories whose tasks are nearest to a text, or in which words stand."""
    from agentrl.datastore.search.embedding import EMBEDDED, default_embedder
    from agentrl.flows.showing import display_for, shown

    if in_messages:
        if method != "hybrid" or diverse is not None or embedder:
            raise fail("error: --text finds words as they are: --method, --diverse and --embedder are about prompts")
        _text_search(text, store, as_json, k=k, where=where, per_task=per_task)
        return
    if method not in ("dense", "lexical", "hybrid"):
        raise fail(f"error: --method {method!r}: allowed are dense, lexical, hybrid")
    options: dict[str, Any] = {"where": where, "method": method, "diverse": diverse, "per_task": per_task}
    with shown("search index", display_for(console(stderr=True), quiet=as_json)) as told:
        hits = open_buffer(store).search(text, k, embedder=embedder, progress=told, **options)
    if not hits.height and not as_json:
        known = (
            "" if (embedder or default_embedder()) != EMBEDDED else "; the buffer's own words are known, and no others"
        )
        say(f"nothing matched {text!r}{' among the rows that pass --where' if where else ''}{known}")
        return
    columns = hits.columns if as_json else ["trajectory_id", "score", "success", "reward", "n_steps", "prompt"]
    print_rows(hits.select(columns).to_dicts(), as_json)


def _text_search(text: str, store: str, as_json: bool, **options: Any) -> None:
    from agentrl.flows.showing import display_for, shown

    with shown("text index", display_for(console(stderr=True), quiet=as_json)) as told:
        hits = open_buffer(store).search(text, method="text", progress=told, **options)
    if not hits.height and not as_json:
        say(f"no row holds {text!r}{' among the rows that pass --where' if options['where'] else ''}")
        return
    columns = hits.columns if as_json else ["trajectory_id", "score", "success", "message", "role", "excerpt"]
    print_rows(hits.select(columns).to_dicts(), as_json)


@command(app)
def index(
    store: Store = "store",
    embedder: Embedder = None,
    of_text: Annotated[
        bool, typer.Option("--text", help="The index of words in messages, which `search --text` and matches() use")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Start over; the embedder of the buffer's own words is fitted anew")
    ] = False,
    shard_engine: ShardsBy = None,
    as_json: Json = False,
) -> None:
    """Bring the search index up to date: only prompts that are new are embedded. If the extra minilm is installed, by
    MiniLM, which knows what words mean, else by the buffer's own words."""
    from dataclasses import asdict

    from agentrl.datastore.search.embedding import EMBEDDED
    from agentrl.datastore.search.index import SearchIndex
    from agentrl.datastore.shards.divide import dividing_of
    from agentrl.flows.showing import display_for, shown

    if of_text and shard_engine:
        raise fail("error: --shard-engine is about prompts that are embedded; --text has none")
    if of_text:
        if embedder:
            raise fail("error: --embedder is about prompts; --text has none")
        with shown("text index", display_for(console(stderr=True), quiet=as_json)) as told:
            print_rows([asdict(open_buffer(store).text.refresh(rebuild, told))], as_json)
        return
    chosen = SearchIndex(open_buffer(store), embedder)
    with shown("search index", display_for(console(stderr=True), quiet=as_json)) as told:
        state = asdict(chosen.refresh(rebuild, told, dividing_of(shard_engine, chosen.buffer.store, told)))
    del state["parts"]  # names of files
    print_rows([state], as_json)
    if as_json:
        return
    if state["cut"]:
        say(
            f"{state['cut']} prompts are longer than what the embedder looks at; what is beyond is found by words alone"
        )
    if chosen.name == EMBEDDED and embedder is None:
        say(f"the embedder knows the buffer's own words alone; one that knows their meaning: {install_hint('minilm')}")


@command(app)
def experience(
    prompt: Annotated[str, typer.Argument(help="The task to find demonstrations for")],
    store: Store = "store",
    k: Best = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Budget, estimated at four characters a token")] = 1024,
    embedder: Embedder = None,
    as_json: Json = False,
) -> None:
    """Turn the best matching successful runs into demonstrations, never from held-out splits."""
    examples = open_buffer(store).experience(prompt, k=k, max_tokens=max_tokens, embedder=embedder)
    if as_json:
        say_json(
            [
                {"trajectory_id": example.trajectory_id, "tokens": example.tokens, "text": example.text}
                for example in examples
            ]
        )
        return
    for example in examples:
        say(f"--- {example.trajectory_id}, about {example.tokens} tokens\n{example.text}\n")
    if not examples:
        say("no successful run of another task of the train split fits")


@command(app)
def curate(
    file: Annotated[Path, typer.Argument(help="A YAML file with rules; see docs/reference/buffer.md")],
    rows: Rows,
    dry_run: DryRun = False,
    name: Name = "curated",
    as_json: Json = False,
) -> None:
    """Narrow trajectories by rules to a selection, and print the funnel. Rows are of the train split unless --split
    says otherwise."""
    from agentrl.datastore.curation.rules import Rules
    from agentrl.flows.commands._selections import funnel_of, rules_of

    chosen = rules_of(file, Rules)
    fingerprint = None
    if dry_run:
        count, funnel = _tried(rows, chosen)
    else:
        config = {
            "where": rows.where,
            "split": rows.split_or("train"),
            **chosen.model_dump(mode="json", exclude={"seed"}),
        }
        manifest = _published(rows, name, config, chosen.seed, file)
        fingerprint, count = manifest.fingerprint, manifest.outputs["trajectories"].rows or 0
        funnel = funnel_of(manifest, rows)
    if as_json:
        say_json({"rows": count, "fingerprint": fingerprint, "funnel": funnel})
        return
    print_rows([{key: level[key] for key in ("rule", "before", "after")} for level in funnel], as_json)
    for level in funnel:
        for line in _dropped(rows.store, level["dropped_examples"]):
            say(f"  {level['rule'].split()[0]} dropped {line}")
    if funnel and funnel[0]["rule"].startswith("split "):
        say(f"{funnel[0]['before'] - funnel[0]['after']} rows of other splits are left out; --split all takes them")
    if fingerprint is None:
        say(f"{count} rows; a dry run, nothing was published")
        return
    say(f"{count} rows; selection {name}/{fingerprint[:8]}")
    if dropped := sum(level["before"] - level["after"] for level in funnel):
        say(f"{dropped} dropped rows, each with its rule: output `dropped` of agentrl show {name}/{fingerprint[:8]}")


@command(app)
def select(
    name: Annotated[str, typer.Argument(help="Name of the selection in the catalog")],
    rows: Rows,
    at: At = None,
    ids: Annotated[Path | None, typer.Option(help="Only the rows of this text file, an id in each line")] = None,
    as_json: Json = False,
) -> None:
    """Save rows as a selection with a name, which pipelines and other commands take. Rows are of the train split unless
    --split says otherwise. What was saved under this name before stays."""
    from agentrl.flows.commands._selections import publish, saved_before, selected

    before, split = saved_before(rows.store, name), rows.split_or("train")
    buffer = open_buffer(rows.store)

    def save(number: int) -> "tuple[int, Manifest]":
        if not len(selected(buffer, rows, split, number, ids)):
            reason = f"error: no row of version {number} is chosen, so nothing was saved; --split all takes all splits"
            raise fail(reason)
        config = {"version": number, "where": rows.where, "split": split, "ids": ids and str(ids)}
        return number, publish(rows, name, config, 0, Path()).manifest

    number, manifest = buffer.newest(save) if at is None else save(buffer.table(version(at)).version())
    saved, count = f"{name}/{manifest.fingerprint[:8]}", manifest.outputs["trajectories"].rows
    others = [earlier for earlier in before if earlier.fingerprint != manifest.fingerprint]
    again = len(others) < len(before)
    if as_json:
        answer = {"fingerprint": manifest.fingerprint, "rows": count, "version": number, "again": again}
        say_json(answer | {"before": [f"{name}/{manifest.fingerprint[:8]}" for manifest in others]})
        return
    if left := manifest.metrics["other_splits"]:
        say(f"{left} rows of other splits are left out; --split all takes them")
    say(f"{count} rows of version {number}; selection {saved}{', which was there already' if again else ''}")
    if others:
        say(f"{name} alone now means the newest; {len(others)} saved before stay: {name}/{others[0].fingerprint[:8]}")


def _published(rows: Rows, name: str, config: dict[str, Any], seed: int, source: Path) -> "Manifest":
    """What ``trajectories.select`` publishes of the newest version. Raises StoreError if there is none."""
    from agentrl.flows.commands._selections import publish

    def of(version: int) -> "Manifest":
        return publish(rows, name, {"version": version, **config}, seed, source).manifest

    return open_buffer(rows.store).newest(of)


def _tried(rows: Rows, chosen: "Rules") -> tuple[int, list[dict[str, Any]]]:
    """How many rows rules would leave, and the funnel."""
    from agentrl.datastore.curation.curate import curate as apply
    from agentrl.flows.commands._selections import left_out, selected
    from agentrl.pipelines.stages.curate import funnel_table
    from agentrl.pipelines.stages.select import first_level

    buffer, split = open_buffer(rows.store), rows.split_or("train")
    ids = selected(buffer, rows, split)
    seed, embedder = chosen.seed, chosen.embedder
    result = buffer.newest(lambda at: apply(buffer, chosen.rules, ids=ids, seed=seed, embedder=embedder, version=at))
    funnel = [*first_level(split, left_out(buffer, rows, split), len(ids)), *result.funnel]
    return len(result.ids), funnel_table(funnel).to_pylist()


def _dropped(store: str, ids: list[str]) -> list[str]:
    columns = ["trajectory_id", "reward", "prompt"]
    rows = open_buffer(store).read(ids, columns).to_pylist()
    return [f"{row['trajectory_id']} (reward {_number(row['reward'])}): {row['prompt'][:60]}" for row in rows]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


@command(app)
def sample(
    n: Annotated[int, typer.Argument(min=1, help="Rows to draw")],
    rows: Rows,
    strategy: Annotated[
        str, typer.Option(help="uniform, success_first, prioritized, recency, diversity, curriculum")
    ] = "uniform",
    seed: Seed = 0,
    name: Name = "sampled",
    as_json: Json = False,
) -> None:
    """Draw training rows into a selection, of the train split unless --split says otherwise."""
    from agentrl.flows.commands._selections import selection_of

    draw = {"strategy": strategy, "n": n}
    config = {"where": rows.where, "split": rows.split_or("train"), "draw": draw}
    manifest = _published(rows, name, config, seed, Path())
    if as_json:
        drawn = selection_of(manifest, rows)
        say_json({"fingerprint": manifest.fingerprint, "ids": drawn["trajectory_id"], "weights": drawn["weight"]})
    else:
        if left := manifest.metrics["other_splits"]:
            say(f"{left} rows of other splits are left out; --split all takes them")
        say(f"{manifest.outputs['trajectories'].rows} rows; selection {name}/{manifest.fingerprint[:8]}")
