"""Search for prompts: what each embedder and method finds, of paraphrases and of keywords.

    python benchmarks/prompts.py                some minutes; needs the extras retrieval and minilm
    SCALE=small python benchmarks/prompts.py    fewer prompts and queries
    CHECK=1 ...                                 exit code 1 if a target is missed

The prompts are those of nine task families and of 172 pairs that were written by hand (``search_pairs.tsv``). Recall at
10: of the prompts that answer a query, or of ten if there are more, the share among the first ten. Half of the
queries, drawn at random, were looked at when the weights of ``datastore/search/fusion.py`` were chosen; targets are
judged on the other half. ``equal ranks`` is the reciprocal rank fusion that was the default before.
"""

import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict

from search_queries import Query, keywords, paraphrases

from agentrl.datastore import TrajectoryBuffer
from agentrl.environments import load_environment
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

SMALL = os.environ.get("SCALE") == "small"
FAMILIES = ("lookup", "rooms", "search_qa", "math", "code", "shop", "service", "office", "research")
EACH = 20 if SMALL else 150
SERVICE = 20
"""The family of customers has few ways to begin."""
WORDS = ("names", "rare words", "ids", "phrases", "several words")
K, POOL, RRF = 10, 100, 60
TARGET = 0.95

Results = dict[tuple[str, str, bool], list[float]]
"""(way to search, kind of query, whether it is of the half that targets are judged on) -> recall of each query."""


def prompts(queries: list[Query]) -> list[str]:
    result = {answer for query in queries for answer in query.answers}
    for family in FAMILIES:
        size = SERVICE if family == "service" else EACH
        result |= {task.prompt for task in load_environment(family).tasks({"train": size}, 1)["train"]}
    return sorted(result)


def row(number: int, prompt: str) -> Trajectory:
    return Trajectory(
        trajectory_id=f"row-{number:05d}",
        episode_id=f"row-{number:05d}",
        task_id=f"task-{number:05d}",
        env="prompts",
        env_version="1",
        split="train",
        prompt=prompt,
        stage="benchmark",
        fingerprint="0" * 64,
        run_id="benchmark",
        policy="none",
        source="imported",
        reward=None,
        success=None,
        n_steps=1,
        n_tokens=0,
        n_action_tokens=0,
        n_tool_calls=0,
        termination=Termination.ANSWERED,
        messages=[Message(role=Role.USER, content=prompt), Message(role=Role.ASSISTANT, content="done")],
    )


def recall(actual: list[str], query: Query) -> float:
    return len(set(actual[:K]) & query.answers) / min(K, len(query.answers))


def equal_ranks(*lists: list[str]) -> list[str]:
    """Prompts by the sum of their reciprocal ranks (Cormack et al., 2009)."""
    sums: dict[str, float] = defaultdict(float)
    for each in lists:
        for rank, prompt in enumerate(each, 1):
            sums[prompt] += 1 / (RRF + rank)
    return sorted(sums, key=lambda prompt: (-sums[prompt], prompt))


def measure(buffer: TrajectoryBuffer, queries: list[Query], judged: list[bool]) -> Results:
    results: Results = defaultdict(list)
    for query, half in zip(queries, judged, strict=True):
        lexical = _found(buffer, query, "embedded", "lexical")
        ways = {"lexical": lexical}
        for embedder in ("embedded", "minilm"):
            dense = _found(buffer, query, embedder, "dense")
            ways[f"{embedder} dense"] = dense
            ways[f"{embedder} equal ranks"] = equal_ranks(dense, lexical)
            ways[f"{embedder} hybrid"] = _found(buffer, query, embedder, "hybrid")
        for way, result in ways.items():
            results[way, query.kind, half].append(recall(result, query))
    return results


def _found(buffer: TrajectoryBuffer, query: Query, embedder: str, method: str) -> list[str]:
    return buffer.search(query.text, POOL, embedder=embedder, method=method, refresh=False)["prompt"].to_list()


def of(results: Results, way: str, kinds: tuple[str, ...], judged: bool) -> float:
    return statistics.mean(value for kind in kinds for value in results[way, kind, judged])


def report(results: Results) -> bool:
    """Print the tables and the lines of the targets; whether all are met."""
    written = ("few common words", "natural")
    ways = list(dict.fromkeys(way for way, _, _ in results))
    for judged, half in ((False, "weights chosen on"), (True, "judged on")):
        print(f"\nrecall at {K}, half of the queries ({half})")
        print(f"{'':24}{'paraphrases':>12}{'keywords':>10}   " + "".join(f"{kind:>18}" for kind in (*written, *WORDS)))
        for way in ways:
            both = [of(results, way, kinds, judged) for kinds in (written, WORDS)]
            each = "".join(f"{of(results, way, (kind,), judged):18.3f}" for kind in (*written, *WORDS))
            print(f"{way:24}{both[0]:12.3f}{both[1]:10.3f}   {each}")
    met = True
    print()
    for what, kinds in (("paraphrases", written), ("keywords", WORDS)):
        neural, own = (of(results, f"{name} hybrid", kinds, True) for name in ("minilm", "embedded"))
        before = of(results, "embedded equal ranks", kinds, True)
        met &= _line(f"minilm, default method, {what}", neural, TARGET)
        met &= _line(f"embedded, default method, {what}, against equal ranks", own, before)
    return met


def _line(what: str, figure: float, least: float) -> bool:
    met = figure >= least - 1e-9
    print(f"{what:66} {figure:.3f}  >= {least:.3f}  {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    written = paraphrases()
    corpus = prompts(written)
    queries = written + keywords(corpus, 10 if SMALL else 40, 0)
    order = list(range(len(queries)))
    random.Random(0).shuffle(order)
    chosen_on = set(order[::2])
    with tempfile.TemporaryDirectory() as folder:
        buffer = TrajectoryBuffer(folder)
        buffer.append([row(*item) for item in enumerate(corpus)], stage="benchmark", fingerprint="0" * 64)
        for embedder in ("embedded", "minilm"):
            buffer.search("x", embedder=embedder)
        print(f"{len(corpus)} prompts, {len(queries)} queries")
        met = report(measure(buffer, queries, [number not in chosen_on for number in range(len(queries))]))
    return int(os.environ.get("CHECK") == "1" and not met)


if __name__ == "__main__":
    sys.exit(main())
