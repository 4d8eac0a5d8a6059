"""The coverage of an online stage, as it is shown: what it drew, by how old it was when it was trained on."""

import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.online import coverage
from agentrl.schemas.manifest import Manifest

COLUMNS = ("versions old", "tickets", "rollouts", "without a reward", "turns")


def covered(catalog: Catalog, manifest: Manifest) -> list[list[str]]:
    """A line for each age, and one of all if there are several, as :data:`COLUMNS`. None if the artifact is of another
    stage."""
    record = manifest.outputs.get("coverage")
    if record is None or not manifest.ingredients.uses.startswith("train."):
        return []
    ages = coverage.by_age(pq.read_table(catalog.local(manifest, record.path)))
    lines = [[str(value) for value in age.values()] for age in ages]
    if len(ages) > 1:
        names = list(ages[0])[1:]
        lines.append(["all", *(str(sum(age[name] for age in ages)) for name in names)])
    return lines
