"""Which format a file is read by, and what a file that fits none looks like."""

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import detect, named
from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.source import Source

SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".traj", ".parquet", ".eval", ".csv", ".tsv", ".gz"})
"""Files of a folder that are looked at."""


def format_of(source: Source, format: str | OwnFormat | None, alone: bool) -> str | OwnFormat | None:
    """The format to read a file by. None if it fits none and came from a folder; raises if it was named itself."""
    if not alone and source.path.suffix not in SUFFIXES:
        return None
    try:
        if format is not None:
            if named(format).fits(source):
                return format
        elif found := detect(source):
            return found
        if not alone:
            return None
    except StoreError:
        if not alone and source.notes.quarantine:
            return None
        raise
    looks = detect(source)
    if format is not None and looks:
        raise StoreError(f"{source.name} does not look like {format}, it looks like {looks}; leave -f out")
    wanted = f"does not look like {format}" if format else "fits no format"
    raise StoreError(f"{source.name} {wanted}: it is {_description(source)}; docs/formats.md says what each looks like")


def _description(source: Source) -> str:
    kind = _KINDS[source.kind]
    head = source.head
    if isinstance(head, dict):
        what = f"{kind} with the {'columns' if source.kind in ('csv', 'parquet') else 'keys'} "
        known = next((f"; {text}" for keys, text in _LOOKS.items() if keys <= head.keys()), "")
        return what + ", ".join(map(str, list(head)[:12])) + known
    if isinstance(head, list):
        return f"{kind} of lists"
    if head is None and source.kind not in ("empty", "folder", "zip"):
        return f"text that is not {kind} ({source.headless})" if source.headless else f"text that is not {kind}"
    return kind


_KINDS = {
    "lines": "JSON Lines",
    "array": "a JSON array",
    "document": "a JSON document",
    "csv": "CSV",
    "parquet": "Parquet",
    "empty": "empty",
    "folder": "a folder",
    "zip": "a ZIP archive",
}
_LOOKS = {
    frozenset({"messages_display"}): "these are tau-bench's few-shot texts, without messages: import its results",
    frozenset({"simulation_index", "tasks"}): "this is a tau2 run without its simulations: import the folder it is in",
    frozenset({"input", "output", "timestamp"}): "these may be Langfuse's traces: export its observations",
    frozenset({"prompt", "completions", "labels"}): "this is TRL's stepwise supervision, which has no whole answer",
    frozenset({"responses_create_params"}): "these are NeMo Gym's inputs, without responses: import its rollouts",
    frozenset({"input_ids"}): "these are token ids without messages",
}
"""What files look like that people have, and that no reader takes: keys, and what to do."""
