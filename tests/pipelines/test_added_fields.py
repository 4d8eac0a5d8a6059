"""Config fields that were added leave the fingerprints of what was made before."""

import hashlib
import json

import pytest

from agentrl.pipelines.file.library import builtin_stages
from agentrl.pipelines.plan.fingerprint import _hashed, _unhashed

OF_THE_FIRST_VERSION = {
    "train.online": "2cd6a24fedc42bef",
    "train.grpo": "2cd6a24fedc42bef",
    "train.offline": "472ef07e80d3510d",
    "trajectories.sample": "78a137677cced3ff",
    "trajectories.synthesize": "d859cae7cafb6859",
    "trajectories.rationalize": "f921187fb40c062c",
    "trajectories.correct": "1377d1e134635aab",
    "search.tree": "0a57dae1077b5200",
    "evaluate.policy": "3d15a5ec964e9a42",
}
"""Digests of what enters the fingerprint of a config with defaults alone."""


def _entering(stage: str, **settings: object) -> str:
    config = _hashed(builtin_stages()[stage].config.model_validate(settings), _unhashed(stage))
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("stage", OF_THE_FIRST_VERSION)
def test_fields_that_came_later_leave_the_fingerprints_of_before(stage: str) -> None:
    assert _entering(stage) == OF_THE_FIRST_VERSION[stage]


def test_a_field_that_came_later_counts_if_it_is_set() -> None:
    before = OF_THE_FIRST_VERSION["train.online"]
    assert _entering("train.online", observe={}) == before
    assert _entering("train.online", observe={"tool": 0.1}) != before


def test_what_ranks_exchange_counts_if_it_is_rounded() -> None:
    def spread(**settings: object) -> str:
        return _entering("train.online", optimizer={"precision": "bfloat16"}, deepspeed={"zero": 3, **settings})

    assert spread() == spread(communication="float32")
    assert spread() != spread(communication="bfloat16")
