"""Vectors of texts, made in this process or by the workers of an engine. A worker keeps its model from one shard to the
next. Which texts are embedded together depends on the texts alone: the rounding of a vector may depend on that."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from agentrl.datastore.search.embedding import EMBEDDED, Embedder, LatentEmbedder, pretrained
from agentrl.datastore.shards.divide import Run, in_groups
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


class Divided(Protocol):
    """What runs shards, and how many; None: by the size of the work."""

    @property
    def run(self) -> Run: ...

    @property
    def shards(self) -> int | None: ...


def embedded_by_shards(
    batches: Iterable[Sequence[str]], name: str, fitted: LatentEmbedder | None, work: Path, divided: Divided
) -> tuple[np.ndarray, int]:
    """The same, by shards."""
    made = list(each_embedded(batches, name, fitted, work, divided))
    return np.concatenate([vectors for vectors, _ in made]), sum(cut for _, cut in made)


def each_embedded(
    batches: Iterable[Sequence[str]],
    name: str,
    fitted: LatentEmbedder | None,
    work: Path,
    divided: Divided,
    identity: str | None = None,
) -> Iterator[tuple[np.ndarray, int]]:
    """The same of one batch after another, when all are made. What shards made lies below ``work``; ``fitted`` is the
    embedder that was fitted here, if ``name`` means that one. Raises ShardError if workers have different models under
    its name, or another one than ``identity`` says."""
    folder = work / f"vectors-{digest_of(name, fitted and fitted.identity)}"
    model = None if fitted is None else folder / "embedder.npz"
    if fitted is not None and model is not None and not model.exists():
        with finished(model) as unfinished, unfinished.open("wb") as file:
            fitted.save(file)
    files = [_kept_texts(batch, folder) for batch in batches]
    missing = [paths for paths in dict.fromkeys(files) if not paths[1].exists()]
    shards = [
        Shard(f"vectors of part {number + 1}", f"{__name__}:embed", (group, name, model))
        for number, group in enumerate(in_groups(missing, divided.shards, BATCHES))
    ]
    divided.run(shards, "vectors")
    models = {str(_value(path, "model")) for _, path in files} | ({identity} if identity else set())
    if len(models) > 1:
        raise ShardError(
            f"there are different models under the name {name!r}: {', '.join(sorted(models))}; give a folder that "
            "all of them see, or install one version on all workers"
        )
    for _, path in files:
        yield _value(path, "vectors"), int(_value(path, "cut"))


def _value(path: Path, name: str) -> np.ndarray:
    with np.load(path) as made:
        return made[name]


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
