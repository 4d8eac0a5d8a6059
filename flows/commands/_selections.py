"""Selections on the command line: which rows a command works on, and publishing what it chose."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastore.buffer import TrajectoryBuffer
    from datastore.curation.rules import Rules


def selected(buffer: "TrajectoryBuffer", where: str | None, selection: str | None) -> list[str]:
    """Ids of a selection in its order, or of all rows sorted, as far as ``where`` holds."""
    from datastore.errors import StoreError

    rows = buffer.sql(f"select trajectory_id from trajectories{f' where {where}' if where else ''}")
    ids = rows["trajectory_id"].sort().to_list()
    if selection is None:
        return ids
    import polars as pl

    from datastore.catalog import Catalog
    from schemas.manifest import Kind

    stage, _, fingerprint = selection.partition("/")
    catalog = Catalog(buffer.store)
    found = [one for one in catalog.manifests(stage) if one.fingerprint.startswith(fingerprint)]
    outputs = [one for one in found[0].outputs.values() if one.kind is Kind.TRAJECTORIES] if found else []
    if not outputs:
        raise StoreError(f"there is no selection {selection!r}; `agentrl status` lists the artifacts")
    chosen = pl.read_parquet(catalog.local(found[0], outputs[0].path))["trajectory_id"].to_list()
    allowed = set(ids)
    return [one for one in chosen if one in allowed]


def publish(
    buffer: "TrajectoryBuffer",
    name: str,
    uses: str,
    config: dict[str, Any],
    seed: int,
    ids: list[str],
    weights: list[float],
) -> str:
    """Publish a selection as an artifact and give its fingerprint, which is of its content and of how it was made."""
    import hashlib
    from datetime import UTC, datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    from datastore.catalog import Catalog
    from datastore.digest import digest
    from pipelines.handles import SELECTION_SCHEMA
    from schemas.manifest import Ingredients, Kind, Manifest, OutputRecord

    catalog = Catalog(buffer.store)
    version = buffer.version
    content = json.dumps([name, uses, config, seed, version, ids, weights], sort_keys=True, default=str)
    fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    folder = catalog.staging(name, fingerprint)
    table = pa.table({"trajectory_id": ids, "weight": weights}, schema=SELECTION_SCHEMA)
    pq.write_table(table, folder / "trajectories.parquet", compression="zstd")
    path = folder / "trajectories.parquet"
    output = OutputRecord(kind=Kind.TRAJECTORIES, path=path.name, rows=len(ids), digest=digest(path))
    ingredients = Ingredients(
        scheme=1, stage=name, uses=uses, uses_version="1", config=config, seed=seed, inputs={}, code={}
    )
    manifest = Manifest(
        fingerprint=fingerprint,
        ingredients=ingredients,
        outputs={"trajectories": output},
        run_id="command",
        created_at=datetime.now(UTC),
        duration_s=0.0,
        buffer_version=version,
    )
    catalog.publish(manifest, folder)
    return fingerprint


def rules(path: Path) -> "Rules":
    from pydantic import ValidationError
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    from datastore.curation.rules import Rules
    from datastore.errors import StoreError

    try:
        content = YAML(typ="safe").load(path)
    except FileNotFoundError:
        raise StoreError(f"there is no rules file {path}") from None
    except YAMLError as error:
        raise StoreError(f"{path} is not YAML: {error}") from None
    try:
        return Rules.model_validate({"rules": content} if isinstance(content, list) else content)
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()]
        raise StoreError(f"{path} does not hold rules:\n" + "\n".join(lines)) from None
