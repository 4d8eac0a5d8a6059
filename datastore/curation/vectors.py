"""Vectors of texts, made in this process or by the workers of an engine. A worker keeps its model from one shard to the
next. Which texts are embedded together depends on the texts alone: the rounding of a vector may depend on that."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from agentrl.datastore.curation.division import Division
from agentrl.datastore.search.embedding import EMBEDDED, Embedder, LatentEmbedder, pretrained
from agentrl.datastore.shards.divide import in_groups
from agentrl.datastore.shards.shard import Shard, ShardError, digest_of, finished

TEXTS = 1024
"""Texts that are embedded at once."""
BATCHES = 4
"""Times so many texts a shard embeds, if no number of shards is asked for."""


def embedded(batches: Iterable[Sequence[str]], embedder: Embedder) -> tuple[np.ndarray, int]:
    """Vectors of texts, float32 [texts, dimensions], and how many of the texts are longer than what is looked at."""
    vectors, cut = list[np.ndarray](), 0
    for batch in batches:
        vectors.append(embedder.encode(batch))
        cut += embedder.cut(batch)
    return np.concatenate(vectors or [embedder.encode([])]), cut


def embedded_by_shards(
    batches: Iterable[Sequence[str]], name: str, fitted: LatentEmbedder | None, division: Division
) -> tuple[np.ndarray, int]:
    """The same, by shards; ``fitted`` is the embedder that was fitted here, if ``name`` means that one. Raises
    ShardError if workers have different models under its name."""
    folder = division.work / f"vectors-{digest_of(name, fitted and fitted.identity)}"
    model = None if fitted is None else folder / "embedder.npz"
    if fitted is not None and model is not None and not model.exists():
        with finished(model) as unfinished, unfinished.open("wb") as file:
            fitted.save(file)
    work = [_kept_texts(batch, folder) for batch in batches]
    missing = [paths for paths in dict.fromkeys(work) if not paths[1].exists()]
    shards = [
        Shard(f"vectors from text {number * TEXTS}", f"{__name__}:embed", (group, name, model))
        for number, group in enumerate(in_groups(missing, division.shards, BATCHES))
    ]
    division.run(shards, "vectors")
    made = [np.load(path) for _, path in work]
    if len(models := {str(each["model"]) for each in made}) > 1:
        raise ShardError(
            f"workers have different models under the name {name!r}: {', '.join(sorted(models))}; give a folder that "
            "all of them see, or install one version on all workers"
        )
    return np.concatenate([each["vectors"] for each in made]), sum(int(each["cut"]) for each in made)


def _kept_texts(batch: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Files for texts, which are written, and for their vectors; their names say which texts they are."""
    name = digest_of(*batch)
    texts = folder / f"{name}.arrow"
    if not texts.exists():
        table = pa.table({"text": pa.array(batch, pa.large_string())})
        with finished(texts) as unfinished, pa.ipc.new_file(unfinished, table.schema) as writer:
            writer.write_table(table)
    return texts, folder / f"{name}.npz"


def embed(work: Sequence[tuple[Path, Path]], name: str, fitted: Path | None) -> None:
    """Write the vectors of the texts in files, how many of the texts are cut, and which model it was."""
    model = _model(name, fitted)
    for texts, path in work:
        batch = pa.ipc.open_file(pa.memory_map(str(texts))).read_all()["text"].to_pylist()
        vectors, cut = embedded([batch], model)
        with finished(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, vectors=vectors, cut=cut, model=np.array(model.identity))


@lru_cache(maxsize=1)
def _model(name: str, fitted: Path | None) -> Embedder:
    """Loaded once in a process."""
    if name == EMBEDDED:
        assert fitted is not None
        return LatentEmbedder.load(fitted)
    return pretrained(name)
