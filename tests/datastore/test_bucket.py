"""What is said of a bucket before anything runs."""

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.file.readiness import store_problem


def test_a_bucket_that_can_be_used_has_no_problem(s3_store: str) -> None:
    assert store_problem(s3_store, write=True) is None
    assert TrajectoryBuffer(s3_store).version is None, "asking made no table"


def test_a_bucket_that_is_not_there_is_said(s3_store: str) -> None:
    problem = store_problem("s3://no-such-bucket/team", write=False) or ""
    assert "store 's3://no-such-bucket/team' cannot be used: " in problem
    assert "NoSuchBucket" in problem
    assert "check the name of the bucket, AWS_ENDPOINT_URL" in problem
    assert len(problem.splitlines()) == 1
