"""The viewer on a store in a bucket."""

import pytest
from test_flow_s3 import bucket
from viewer_store import EVAL, GRPO, Browser, make_store, record_run

__all__ = ["bucket"]

pytestmark = pytest.mark.slow

ROW = "grpo-aaaaaaaa-000002"


def test_every_question_is_answered_from_a_bucket(bucket: str) -> None:
    make_store(bucket)
    record_run(bucket)
    browser = Browser(bucket)
    answer = browser.json("/api/overview")
    assert (answer["rows"], answer["pipeline"]) == (24, "sums")
    assert {stage["stage"]: stage["status"] for stage in answer["stages"]} == {
        "warm": "cached",
        "grpo": "cached",
        "eval": "failed",
    }
    assert browser.arrow("/api/rows", filter="success", at=2)["success"].to_pylist() == [True] * 9
    assert browser.json("/api/facets")["total"] == 24
    row = browser.json(f"/api/rows/{ROW}")
    assert row["lineage"]["learned_by"][0]["fingerprint"] == GRPO
    tokens = browser.arrow(f"/api/tokens/{ROW}")
    assert tokens.schema.metadata[b"text"] == b"yes"
    assert b"".join(tokens["text"].cast("binary").to_pylist()).startswith(b"What is 2 + 1?")
    assert browser.json("/api/evaluations")["evaluations"][0]["artifact"] == f"eval/{EVAL[:8]}"
    assert browser.json("/api/task/tree", env="sums", task_id="sums-0")["rows"] == 4
    for path in ("/api/pairs", "/api/training", "/api/curation"):
        browser.json(path)
