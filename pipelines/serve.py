"""The recorder of a store: the model, the engine and the buffer behind `agentrl serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import InvalidRowsError, StoreError
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import EmbeddedConfig, EngineConfig
from agentrl.pipelines.generate import policy_of
from agentrl.pipelines.parts.budget import SamplingConfig
from agentrl.pipelines.tokenizers import keep_tokenizer
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.json_text import shown, unstorable
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.redaction.rows import RowRedaction
    from agentrl.recorder.recorder import Recorder, RecorderSettings

FOLDER = "recordings"
"""Where the files of open episodes are, below the store."""


@dataclass(frozen=True)
class BufferRows:
    """Rows of recordings go to the buffer. A recording is the ``fingerprint`` of its rows. With ``redaction``,
    placeholders stand for the secrets in them, and in annotations."""

    buffer: TrajectoryBuffer
    redaction: "RowRedaction | None" = None

    def stored(self, recording: str) -> set[str]:
        """See :class:`agentrl.recorder.aside.RowStore`."""
        return set(self.buffer.ids(recording))

    def keep(self, recording: str, rows: list[Trajectory]) -> None:
        """See :class:`agentrl.recorder.aside.RowStore`. An append is named by its first episode, which no other one
        has. Raises StoreError if another append has that name, and lacks some of these rows."""
        from agentrl.recorder.aside import UnstorableError

        if self.redaction is not None:
            try:
                rows = [self.redaction.clean(row).row for row in rows]
            except StoreError as error:
                raise UnstorableError(str(error)) from None
        first = min(int(row.episode_id.rpartition("-")[2]) for row in rows)
        try:
            done = self.buffer.append(rows, stage=rows[0].stage, fingerprint=recording, shard=first)
        except InvalidRowsError as error:
            _, name, field, reason = error.problems[0]
            raise UnstorableError(f"{field} of {name} {reason}") from None
        if done.skipped and not {row.trajectory_id for row in rows} <= self.stored(recording):
            raise StoreError(f"append {first} of recording {recording} was made before, with other rows")

    def annotate(self, annotations: list[Annotation]) -> None:
        """See :class:`agentrl.recorder.aside.RowStore`."""
        if self.redaction is not None:
            annotations = [self.redaction.annotation(annotation) for annotation in annotations]
        self.buffer.annotations.append(annotations)


def engine_config(given: Any) -> EngineConfig:
    """The config of an engine that gives token ids; None is the embedded one. Conversations wait for each other under
    ``schedule: exact``, so that the embedded engine is ``free`` here.

    Raises ValueError if there is no such engine.
    """
    try:
        config: EngineConfig = TypeAdapter(TokenEngineChoice).validate_python(given or "transformers")
    except ValidationError as error:
        raise ValueError(
            f"--engine: {'; '.join(problem['msg'] for problem in error.errors(include_url=False))}"
        ) from None
    if isinstance(config, EmbeddedConfig):
        if "schedule" in config.model_fields_set and config.schedule == "exact":
            raise ValueError("--engine: schedule exact waits until every conversation goes on; use free")
        return config.model_copy(update={"schedule": "free"})
    return config


def recordings_of(buffer: TrajectoryBuffer) -> Path:
    """The folder with the files of episodes that are not in the buffer yet, whether or not it exists."""
    storage = buffer.storage
    return (storage.root if isinstance(storage, LocalStorage) else storage.working_folder()) / FOLDER


def recorder_of(
    store: str,
    model: str,
    engine: EngineConfig,
    sampling: SamplingConfig,
    settings: "RecorderSettings",
    name: str | None = None,
    turn_s: float = 600.0,
    seed: int = 0,
    redacted: bool = False,
) -> "Recorder":
    """A recorder of ``model``, an artifact or a folder, that stores rows in ``store``. It is served as ``name``. If
    ``redacted``, placeholders stand for secrets in the rows and annotations that are stored; files of open episodes,
    which go when their rows are stored, have them still.

    Raises LookupError if there is no such model, and ValueError if it cannot be served.
    """
    from agentrl.recorder.episode import LONGEST_NAME
    from agentrl.recorder.episodes import Episodes
    from agentrl.recorder.recorder import Recorder
    from agentrl.recorder.sampler import Sampler

    policy, _ = policy_of(Catalog(store), model)
    policy.name = name or Path(policy.name).name
    if unstorable(policy.name) or len(policy.name) > LONGEST_NAME:
        raise ValueError(
            f"--served-name '{shown(policy.name)[:80]}' cannot be a column of rows: give Unicode text of at most "
            f"{LONGEST_NAME:,} characters"
        )
    _ = policy.codec  # a model whose dialect is not known is refused before anything is served
    buffer = TrajectoryBuffer(store)
    if not keep_tokenizer(buffer.storage, policy) and redacted:
        raise ValueError("--secrets: the tokenizer of this model has no fast form, so its tokens cannot be redacted")
    folder = recordings_of(buffer)
    redaction = None
    if redacted:
        from agentrl.datastore.redaction.rows import RowRedaction

        redaction = RowRedaction(buffer.storage)
    episodes = Episodes(folder, BufferRows(buffer, redaction), policy.name, policy.tokenizer_fingerprint)
    sampler = Sampler(engine.build(policy), policy, sampling.of(policy), turn_s, seed)
    return Recorder(sampler, policy.name, episodes, settings)
