"""The built-in learning stages, chained by hand on a policy of each architecture: no engine, smallest sizes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from datastore.buffer import TrajectoryBuffer
from pipelines.handles import Handle
from pipelines.library import resolve
from pipelines.stage import Context

sys.path.insert(0, str(Path(__file__).parent.parent / "agentrl"))
from policies import llama

EVAL = {"max_turn_tokens": 12, "max_tokens": 120}
SAMPLING = {"max_turn_tokens": 12, "max_tokens": 120}


class Harness:
    """Runs stages one by one on one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.buffer = TrajectoryBuffer(root / "store")
        self.contexts: dict[str, Context] = {}

    def run(self, key: str, uses: str, config: dict[str, Any], **inputs: Any) -> dict[str, Handle]:
        stage = resolve(uses)
        folder, scratch = self.root / key, self.root / f"{key}-scratch"
        folder.mkdir()
        scratch.mkdir()
        fingerprint = f"{len(self.contexts):032x}"[::-1]
        self.contexts[key] = Context(key, fingerprint, "run", 0, self.buffer, folder, scratch)
        return stage(self.contexts[key], stage.config(**config), **inputs)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_a_saved_llama_stands_where_the_tiny_model_stands(harness: Harness, tmp_path: Path) -> None:
    """Another architecture, tokenizer and chat template from disk goes through every learning stage, unchanged."""
    path = tmp_path / "my-llama"
    llama().save(path)
    tasks = harness.run("tasks", "tasks.generate", {"env": "lookup", "train": 16, "dev": 4, "heldout": 8})
    [expert] = harness.run("expert", "trajectories.synthesize", {}, tasks=tasks["train"]).values()
    config = {"model": {"path": str(path)}, "steps": 3, "batch": 8, "optimizer": {"lr": 1e-3}}
    warm = harness.run("warm", "train.sft", config, trajectories=[expert])
    sample_config = {"samples": 4, "shard_tasks": 8, "sampling": SAMPLING}
    [sample] = harness.run(
        "sample", "trajectories.sample", sample_config, model=warm["model"], tasks=tasks["train"]
    ).values()
    assert len(sample.ids()) == 64  # type: ignore[attr-defined]
    grpo_config = {"iterations": 2, "tasks": 4, "samples": 2, **EVAL}
    grpo = harness.run("grpo", "train.grpo", grpo_config, model=warm["model"], tasks=tasks["train"])
    evaluation = harness.run("eval", "evaluate.policy", EVAL, model=grpo["model"], tasks=tasks["heldout"])
    report = harness.run(
        "report",
        "report.training",
        {},
        evaluations=[evaluation["results"]],
        metrics=[warm["metrics"], grpo["metrics"]],
        examples=[evaluation["trajectories"]],
    )["report"]
    page = (report.path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"<(script|link|img|iframe)|url\(\s*['\"]?http|@import", page), "the page is self-contained"
    rows = sample.read()  # type: ignore[attr-defined]
    assert {row.policy for row in rows} == {warm["model"].name}  # type: ignore[attr-defined]
    online = grpo["trajectories"].read()  # type: ignore[attr-defined]
    assert {row.policy_version for row in online} <= {0, 1}
    assert len(online) == 2 * 4 * 2
    assert harness.contexts["eval"].metrics["n_tasks"] == 8


def test_rejection_keeps_the_best_and_shortest_successes(harness: Harness) -> None:
    tasks = harness.run("tasks", "tasks.generate", {"env": "lookup", "train": 24, "dev": 1, "heldout": 1})
    runs = [
        harness.run(f"expert{n}", "trajectories.synthesize", {"noise": noise}, tasks=tasks["train"])["trajectories"]
        for n, noise in enumerate((0.0, 0.6))
    ]
    kept = harness.run("reject", "trajectories.reject", {"keep": 1}, trajectories=runs)["trajectories"]
    everything = {row.trajectory_id: row for selection in runs for row in selection.read()}  # type: ignore[attr-defined]
    chosen = [everything[name] for name in kept.ids()]  # type: ignore[attr-defined]
    assert len(chosen) == len({row.task_id for row in chosen}) == 24
    for row in chosen:
        rivals = [other for other in everything.values() if other.task_id == row.task_id and other.success]
        assert row.n_steps == min(other.n_steps for other in rivals)


def test_training_refuses_rows_of_another_tokenizer_and_empty_selections(harness: Harness, tmp_path: Path) -> None:
    llama().save(tmp_path / "llama")
    tasks = harness.run("tasks", "tasks.generate", {"env": "lookup", "train": 8, "dev": 1, "heldout": 1})
    [expert] = harness.run("expert", "trajectories.synthesize", {}, tasks=tasks["train"]).values()
    tiny = {"model": {"init": "tiny"}, "steps": 1, "batch": 4}
    warm = harness.run("warm", "train.sft", tiny, trajectories=[expert])["model"]
    config = {"samples": 1, "sampling": SAMPLING}
    sample = harness.run("sample", "trajectories.sample", config, model=warm, tasks=tasks["train"])["trajectories"]
    other = {"model": {"path": str(tmp_path / "llama")}, "steps": 1}
    with pytest.raises(ValueError, match=r"sample-.* was tokenised by .*the model .*llama uses"):
        harness.run("bad", "train.sft", other, trajectories=[sample])
    kept = harness.run("reject", "trajectories.reject", {}, trajectories=[sample])["trajectories"]
    with pytest.raises(ValueError, match="nothing to train on"):
        harness.run("empty", "train.sft", {"steps": 1}, trajectories=[kept], model=warm)
    with pytest.raises(ValueError, match=r"inputs\.model or set with\.model"):
        harness.run("neither", "train.sft", {"steps": 1}, trajectories=[expert])


def test_rationalised_rows_carry_no_hint(harness: Harness) -> None:
    """A policy that knows hints solves some tasks with them; what is selected has the plain question."""
    tasks = harness.run("tasks", "tasks.generate", {"env": "lookup", "train": 12, "dev": 1, "heldout": 1})
    shown = {"hinted": 1.0, "noise": 0.0}
    [expert] = harness.run("expert", "trajectories.synthesize", shown, tasks=tasks["train"]).values()
    config = {"model": {"init": "tiny"}, "steps": 80, "batch": 6, "optimizer": {"lr": 5e-3, "warmup": 10}}
    warm = harness.run("warm", "train.sft", config, trajectories=[expert])["model"]
    nothing = harness.run("none", "trajectories.reject", {}, trajectories=[])["trajectories"]
    out = harness.run(
        "rat", "trajectories.rationalize", {"samples": 4}, model=warm, tasks=tasks["train"], trajectories=[nothing]
    )["trajectories"]
    rows = out.read()  # type: ignore[attr-defined]
    prompts = {task.task_id: task.prompt for task in tasks["train"].read()}  # type: ignore[attr-defined]
    assert rows, "the memorised hints solve nothing: the test would pass on an empty selection"
    for row in rows:
        assert row.success
        assert row.source == "rationalized"
        assert row.messages[0].content == prompts[row.task_id]
        assert harness.buffer.get(row.parent_id).source == "hinted"
