"""Selections that are saved from a page, and filters as rules of curation."""

from agentrl.flows.viewer.wire import Answer

# POST /api/selection {name, filter, at, among, rule, ids}


class SavedSelection(Answer):
    """``rows`` of a ``version`` of the buffer are saved as ``artifact``, STAGE/FINGERPRINT. ``again``: they were saved
    under this name before, and nothing was written. ``before`` are other selections of this name, newest first: they
    stay. ``other_splits`` of the rows are not of the train split, and ``absent`` ones of the part of the buffer that
    was asked for are not in this version. ``wiring`` is how a stage of a pipeline file reads them."""

    artifact: str
    rows: int
    version: int
    again: bool
    before: list[str]
    other_splits: int
    absent: int
    wiring: str


# GET /api/rule?filter=&at=


class RuleText(Answer):
    """A filter as a rule of curation in YAML, for `trajectories.curate` and `agentrl buffer curate`. It chooses the
    same ``rows`` of this ``version``; ``other_splits`` of them are left out unless ``split`` is null."""

    text: str
    rows: int
    version: int
    other_splits: int
