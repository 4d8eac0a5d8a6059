"""What other packages keep of the rows of ``scale_data.py``: near duplicates by MinHash, word 3-grams and a threshold
of 0.8, with about 256 hashes. Their interpreter is one of their own, which `make bench-scale-data` installs.

    python scale_peers.py daft | datatrove | text-dedup  TEXTS.parquet  KEPT.json

``TEXTS.parquet`` has columns `id` and `text`. ``KEPT.json`` gets the ids that are kept, and CPU seconds without those
of imports. None of the three verifies pairs; of each cluster of rows whose bands collide, the first is kept.
"""

import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NGRAM, BANDS, BAND_ROWS = 3, 20, 13
"""(1 / 20) ** (1 / 13) is 0.79, the similarity at which a pair is found in half of the cases or more."""
Peer = Callable[[Path, Path], set[int]]
"""From a file of texts and a folder to work in to the ids that are kept."""


def cpu() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def first_of_clusters(clusters: list[list[int]], ids: set[int]) -> set[int]:
    """The ids without those that are joined, by rows that come together, to a smaller one."""
    parent = {name: name for name in ids}

    def root(name: int) -> int:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for cluster in clusters:
        first = min(root(name) for name in cluster)
        for name in cluster:
            parent[root(name)] = first
    return {name for name in ids if root(name) == name}


def daft() -> Peer:
    """Sketches, bands and buckets by Daft; the clusters of its buckets are joined here."""
    import daft as engine
    from daft import col
    from daft.functions import list_join, minhash, slice

    def kept(texts: Path, work: Path) -> set[int]:
        frame = engine.read_parquet(str(texts))
        sketch = minhash(col("text"), num_hashes=BANDS * BAND_ROWS, ngram_size=NGRAM)
        frame = frame.select(col("id"), sketch.cast(engine.DataType.list(engine.DataType.string())).alias("sketch"))
        frame = frame.collect()
        clusters: list[list[int]] = []
        for band in range(BANDS):
            values = slice(col("sketch"), band * BAND_ROWS, (band + 1) * BAND_ROWS)
            keys = frame.select(col("id"), list_join(values, " ").alias("key"))
            together = keys.groupby("key").agg(col("id").list_agg()).to_pydict()["id"]
            clusters += [ids for ids in together if len(ids) > 1]
        return first_of_clusters(clusters, set(frame.to_pydict()["id"]))

    return kept


def datatrove() -> Peer:
    """Its four steps, each by its executor in one task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import TextNormConfig

    def kept(texts: Path, work: Path) -> set[int]:
        shutil.copy(texts, (work / "texts").mkdir() or work / "texts" / "texts.parquet")
        hashes = HashConfig(hash_fc="sha1")  # its default, xxhash, fails with xxhash 4
        words = TextNormConfig(norm_numbers=False)  # else all words of these rows, a letter and digits, are alike
        config = MinhashConfig(
            n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=BAND_ROWS, hash_config=hashes, norm_config=words
        )
        reader = ParquetReader(str(work / "texts"), text_key="text", id_key="id")
        signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
        for number, (steps, tasks) in enumerate(
            (
                ([reader, MinhashDedupSignature(output_folder=signatures, config=config)], 1),
                ([MinhashDedupBuckets(signatures, buckets, config=config)], BANDS),
                ([MinhashDedupCluster(buckets, removed, config=config)], 1),
                ([reader, MinhashDedupFilter(removed), JsonlWriter(str(work / "kept"), compression=None)], 1),
            )
        ):
            LocalPipelineExecutor(steps, tasks=tasks, workers=1, logging_dir=str(work / f"log{number}")).run()
        lines = [line for path in (work / "kept").glob("*.jsonl") for line in path.read_text().splitlines()]
        return {int(json.loads(line).get("id", 0)) for line in lines}  # of 0 it writes no id

    return kept


def text_dedup() -> Peer:
    """Its command, which runs in this process; it chooses bands by itself for 256 hashes."""
    from datasets import load_from_disk
    from text_dedup import minhash

    def kept(texts: Path, work: Path) -> set[int]:
        arguments = f"--path parquet --data_files {texts} --split train --cache_dir {work / 'cache'} "
        arguments += f"--output {work / 'out'} --column text --idx_column id --ngram {NGRAM} --min_length {NGRAM} "
        arguments += "--threshold 0.8 --num_perm 256 --num_proc 1 --hash_func xxh3 --batch_size 10000"
        minhash.main(arguments.split(), standalone_mode=False)
        return set(load_from_disk(str(work / "out"))["id"])

    return kept


PEERS = {"daft": daft, "datatrove": datatrove, "text-dedup": text_dedup}


def main() -> None:
    name, texts, out = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    kept = PEERS[name]()
    with tempfile.TemporaryDirectory() as folder:
        before = cpu()
        ids = kept(texts, Path(folder))
        took = cpu() - before
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be that of the program which started this one
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    out.write_text(json.dumps({"kept": sorted(map(int, ids)), "cpu_s": took, "peak_mb": peak}))


if __name__ == "__main__":
    main()
