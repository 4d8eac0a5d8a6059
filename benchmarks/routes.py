"""Routes of mixtures of experts: how far a policy is from a rounded copy of it that samples, with its routers' own
choices and with the copy's routes replayed; and what routes take in the store.

Three families with random weights, three times as large as they begin, 6 layers, 2 of 16 experts for each token, 1,024
tokens. The trainer computes in float32. Storage is that of 48 layers with 8 of 128 experts: the shape of
Qwen3-30B-A3B, whose routes are drawn here.

    python benchmarks/routes.py
    CHECK=1 ...        # exit code 1 if a target is missed
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests" / "agentrl"))

from mixtures import FAMILIES, mixture
from test_routes import own_routes, rounded, rows_of

from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.routes import FOLDER, RouteTable
from agentrl.engines.routes import RouteShape, route_shape
from agentrl.training.scoring import batch_logprobs

TARGET = 3.0
"""How many times smaller the greatest distance is with replay, at least."""


def distances(kind: str, to: str) -> bool:
    """Print the distances of one family to one copy; whether the target is met."""
    policy = mixture(kind, experts=16, layers=6, scale=0.06)
    sampler, rows = rounded(policy, to), rows_of(policy, (128,) * 8)
    behaviour = np.concatenate(batch_logprobs(sampler, rows))
    shape, theirs, ours = route_shape(policy.model), own_routes(sampler, rows), own_routes(policy, rows)
    assert shape is not None
    alike = [(np.sort(shape.read(theirs[name])) == np.sort(shape.read(ours[name]))).all((1, 2)) for name in theirs]
    results = []
    for given in (rows, rows.routed(theirs)):
        distance = abs(np.concatenate(batch_logprobs(policy, given)) - behaviour)[behaviour != 0]
        results.append((distance.max(), distance.mean()))
    (own_max, own_mean), (replayed_max, replayed_mean) = results
    ratio = own_max / replayed_max
    print(
        f"{kind:12} {to:9} {np.concatenate(alike).mean():6.0%}   {own_max:.3f} {own_mean:.4f}   {replayed_max:.3f} "
        f"{replayed_mean:.4f}   {ratio:5.1f} x   target {TARGET:g} x   {'met' if ratio >= TARGET else 'MISSED'}"
    )
    return bool(ratio >= TARGET)


def storage(tokens: int = 4096, rows: int = 16) -> None:
    """Print the bytes of a token, raw and in the files of the side table."""
    random, shape = np.random.default_rng(0), RouteShape(tuple(range(48)), 8, 128)
    # experts are not chosen alike: the weights of a layer's experts fall like 1 / rank
    weights = 1 / (1 + random.permuted(np.tile(np.arange(128), (48, 1)), axis=1))
    with TemporaryDirectory() as folder:
        table, total = RouteTable(LocalStorage(Path(folder)), "fingerprint"), 0
        for name, even in (("drawn alike", True), ("drawn by 1 / rank", False)):
            table.forget()
            for row in range(rows):
                noise = random.gumbel(size=(tokens, 48, 128)) + (0 if even else np.log(weights))
                routes = np.argpartition(-noise, 8, axis=-1)[..., :8].astype(shape.dtype)
                table.append(row, 0, {f"row-{row}": np.array_split(routes, 8)})
                total = sum(path.stat().st_size for path in (Path(folder) / FOLDER).rglob("*.parquet"))
            stored = total / (rows * tokens)
            print(f"storage, {name:17} {shape.token_bytes} bytes a token raw, {stored:.0f} in the side table")


def main() -> None:
    print("family       copy      alike   own max, mean  replayed max, mean")
    met = [distances(kind, to) for kind in FAMILIES for to in ("bfloat16", "int8")]
    storage(rows=4)
    if os.environ.get("CHECK") and not all(met):
        sys.exit(1)


if __name__ == "__main__":
    main()
