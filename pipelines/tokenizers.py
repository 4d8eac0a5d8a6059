"""From the token ids of rows to text, by the tokenizers that the store keeps or by those of its models."""

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import TokenBytes, keep, kept
from agentrl.datastore.errors import StoreError
from agentrl.schemas.manifest import Kind

if TYPE_CHECKING:
    from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
    from agentrl.models.policy import Speaker

FILE = "tokenizer.json"


def keep_tokenizer(storage: "LocalStorage | S3Storage", speaker: "Speaker") -> bool:
    """Write the tokenizer of a policy into a store, unless it is there. Returns whether it has a form that can be kept:
    tokenizers in Python alone have none."""
    backend = getattr(speaker.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    keep(storage, speaker.tokenizer_fingerprint, backend.to_str)
    return True


def token_bytes(catalog: Catalog, tokenizer: str, policy: str = "") -> TokenBytes:
    """The bytes of each token of a tokenizer, by its fingerprint. If the store does not keep it, because it is older,
    that of the model ``policy`` is taken, as rows that it sampled name it. Imports no torch. For a large vocabulary it
    takes a few tenths of a second: ask once.

    Raises LookupError that says what to run if neither is there, and StoreError if the tokenizer is of a kind that is
    not known.
    """
    data = kept(catalog.storage, tokenizer) if tokenizer else None
    if data is None and tokenizer and (file := _of_model(catalog, policy)):
        data = file.read_bytes()
    if data is None:
        raise LookupError(
            f"tokenizer {tokenizer!r} is not in this store, and the model {policy or '(unknown)'} has no {FILE} any "
            "more; write that of a model folder into the store: agentrl buffer tokenizer FOLDER"
            if tokenizer
            else "these rows have no tokens, or nobody said by which tokenizer; a stage that trains on them makes some"
        )
    return TokenBytes.of(data)


def _of_model(catalog: Catalog, policy: str) -> Path | None:
    """The tokenizer of a model of the store, ``stage/fingerprint``, or of a folder."""
    stage, _, prefix = policy.partition("/")
    manifests = catalog.manifests(stage) if prefix and not policy.startswith(("/", ".")) else []
    for manifest in manifests:
        if not manifest.fingerprint.startswith(prefix):
            continue
        for output in manifest.outputs.values():
            if output.kind is Kind.MODEL:
                try:
                    return catalog.local(manifest, f"{output.path}/{FILE}")
                except StoreError:
                    return None
    outside = Path(policy).expanduser() / FILE
    return outside if policy.startswith(("/", ".", "~")) and outside.is_file() else None
