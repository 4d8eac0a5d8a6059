"""Making, bringing in and opening cuts, for the command and for Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.flows.options import Rows
from agentrl.schemas.cut import IMPORT_CUT, MAKE_CUT

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.cuts.folder import CutFolder
    from agentrl.pipelines.run.execute import Outcome
    from agentrl.pipelines.stage import Progress
    from agentrl.schemas.manifest import Manifest


def make(
    buffer: "TrajectoryBuffer",
    name: str,
    rules: Any,
    selection: str | None,
    split: str | None,
    version: int | None,
    progress: "Progress | None" = None,
) -> "Outcome":
    """Cut the rows of a version (None: the newest), or of a selection, by rules: a YAML file or what one holds.

    Raises StoreError if a rule, the name or the selection is wrong.
    """
    from agentrl.flows.commands._selections import publish, read_rules, saved_before
    from agentrl.pipelines.stages.cut import CutRules

    chosen = read_rules(rules, CutRules)
    saved_before(buffer.store, name, MAKE_CUT)
    settings = chosen.model_dump(mode="json", exclude_unset=True, exclude={"seed"})
    rows = Rows(buffer.store, selection=selection)

    def of(number: int) -> "Outcome":
        return publish(
            rows, name, {"version": number, "split": split, **settings}, chosen.seed, Path(), progress, MAKE_CUT
        )

    return buffer.newest(of) if version is None else of(version)


def bring_in(buffer: "TrajectoryBuffer", path: Path, name: str, progress: "Progress | None" = None) -> "Outcome":
    """Take an exported cut into the store under a name. Raises StoreError if it is none, or not what was exported."""
    from agentrl.flows.commands._selections import publish, saved_before

    saved_before(buffer.store, name, IMPORT_CUT)
    return publish(Rows(buffer.store), name, {"path": str(path)}, 0, Path(), progress, IMPORT_CUT)


def opened(store: str, text: str) -> "tuple[str, CutFolder, Manifest | None]":
    """The name, the folder and the artifact of a cut: of an exported one, which has none, or of the store's.

    Raises StoreError if there is none.
    """
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.cuts.verify import CUT, exported_cut
    from agentrl.datastore.errors import StoreError
    from agentrl.pipelines.results.cuts import find_cut

    if (Path(text) / CUT).is_dir():
        return Path(text).resolve().name, exported_cut(Path(text)), None
    try:
        manifest, folder = find_cut(Catalog(store), text)
    except LookupError as error:
        raise StoreError(f"{error.args[0]}; and no folder {text} holds an exported cut") from None
    return manifest.ingredients.stage, folder, manifest
