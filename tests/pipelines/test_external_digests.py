"""Digests of what lies outside the store, by content."""

from pathlib import Path

from agentrl.pipelines.file.external import external_digest


def test_a_file_counts_with_the_files_that_are_read_with_it(tmp_path: Path) -> None:
    session, helper = tmp_path / "s.jsonl", tmp_path / "s/subagents/agent-1.jsonl"
    session.write_text("{}")
    alone = external_digest(str(session), "file")
    helper.parent.mkdir(parents=True)
    digests = [alone]
    for text in ("{}", '{"a": 1}'):
        helper.write_text(text)
        digests.append(external_digest(str(session), "file"))
    assert len(set(digests)) == 3
    database, log = tmp_path / "a.db", tmp_path / "a.db-wal"
    database.write_text("x")
    before = external_digest(str(database), "file")
    log.write_text("y")
    assert external_digest(str(database), "file") != before
    log.unlink()
    assert external_digest(str(database), "file") == before
