"""The built-in learning stages, chained by hand on a policy of each architecture: no engine, smallest sizes."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from architectures import HIDES_TOOLS, llama

from agentrl.chat.codec import tokenize
from agentrl.models.policy import Policy
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.star.rationalize import rationalize
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.grpo import grpo
from agentrl.pipelines.stages.report import training_report
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import negatives, reject, sample, synthesize
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

LIMITS = {"max_turn_tokens": 12, "max_tokens": 120}


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.mark.slow
def test_a_saved_llama_stands_where_the_tiny_model_stands(harness: Harness, tmp_path: Path) -> None:
    """Another architecture, tokenizer and chat template from disk goes through every learning stage, unchanged. It
    learns two ways to act in each task, so that rollouts of a group differ in reward and the online steps are taken."""
    path = tmp_path / "my-llama"
    llama().save(path)
    tasks = harness.run(generate, {"env": "lookup", "train": 4, "dev": 4, "heldout": 8})
    shown = [harness.run(synthesize, {"noise": noise}, tasks=tasks["train"])["trajectories"] for noise in (0.0, 1.0)]
    config = {"model": {"path": str(path)}, "steps": 120, "batch": 8, "optimizer": {"lr": 5e-3, "warmup": 10}}
    warm = harness.run(sft, config, trajectories=shown)
    limits = {"max_turn_tokens": 64, "max_tokens": 400}
    sampled = harness.run(
        sample, {"samples": 4, "shard_tasks": 2, "sampling": limits}, model=warm["model"], tasks=tasks["train"]
    )["trajectories"]
    assert len(sampled.ids()) == 16
    assert {row.policy for row in sampled.read()} == {warm["model"].name}
    config = {"iterations": 2, "tasks": 4, "samples": 4, "optimizer": {"lr": 1e-4}, **limits}
    online = harness.run(grpo, config, model=warm["model"], tasks=tasks["train"])
    rows = online["trajectories"].read()
    assert len(rows) == 2 * 4 * 4
    assert len({row.reward for row in rows}) > 1
    assert {row.policy_version for row in rows} == {0, 1}
    assert all(row["grad_norm"] > 0 for row in online["metrics"].table().to_pylist())
    before, after = (Policy.load(made["model"].path).model.state_dict() for made in (warm, online))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    evaluation = harness.run(evaluate, limits, model=online["model"], tasks=tasks["heldout"])
    assert evaluation.metrics["n_tasks"] == 8
    assert [made.metrics["dialect"] for made in (warm, online, evaluation)] == ["hermes"] * 3
    report = harness.run(
        training_report,
        evaluations=[evaluation["results"]],
        metrics=[warm["metrics"], online["metrics"]],
        examples=[evaluation["trajectories"]],
    )["report"]
    page = (report.path / "report.html").read_text()
    assert page.count("<svg") == 4
    text = "drew 8 tasks and trained on the rollouts of each of them once, of the newest version."
    assert text in page
    assert text in (report.path / "report.md").read_text()
    assert not re.search(r"<(script|link|img|iframe)|url\(\s*['\"]?http|@import", page), "the page is self-contained"


def test_rejection_keeps_the_best_and_shortest_successes(harness: Harness) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 24, "dev": 1, "heldout": 1})["train"]
    runs = [harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"] for noise in (0.0, 0.6)]
    kept = harness.run(reject, {"keep": 1}, trajectories=runs)["trajectories"]
    everything = {row.trajectory_id: row for selection in runs for row in selection.read()}
    chosen = [everything[name] for name in kept.ids()]
    assert len(chosen) == len({row.task_id for row in chosen}) == 24
    for row in chosen:
        rivals = [other for other in everything.values() if other.task_id == row.task_id and other.success]
        assert row.n_steps == min(other.n_steps for other in rivals)


def test_compositional_tasks_are_refused_of_an_environment_without_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"env": "lookup", "train": 8, "dev": 2, "heldout": 2}
    assert harness.run(generate, sizes)["compositional"].read() == []
    assert len(harness.run(generate, {**sizes, "compositional": 4})["compositional"].read()) == 4
    monkeypatch.setattr("agentrl.environments.lookup.LookupEnvironment.compositional", False)
    with pytest.raises(ValueError, match=r"env .lookup. has no compositional split: set with\.compositional to 0"):
        harness.run(generate, {**sizes, "compositional": 4})


def _attempt(name: str, task: str, tokens: list[int], success: bool = True, n_steps: int = 1) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        task_id=task,
        source="model",
        env="lookup",
        split="train",
        prompt="?",
        reward=float(success),
        success=success,
        termination=Termination.ANSWERED,
        n_steps=n_steps,
        n_tokens=len(tokens),
        n_action_tokens=len(tokens) - 1,
        messages=[Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content="!")],
        tokenizer="t",
        input_ids=tokens,
        action_mask=[False] + [True] * (len(tokens) - 1),
        logprobs=[float("nan")] + [-0.1] * (len(tokens) - 1),
    )


def test_rejection_prefers_what_rollouts_of_a_task_agree_on_and_can_ask_for_it(harness: Harness) -> None:
    rows = harness.trajectories(
        [
            _attempt("lucky", "a", [1, 9], n_steps=1),
            _attempt("usual-1", "a", [1, 2, 3], n_steps=2),
            _attempt("usual-2", "a", [1, 2, 3], n_steps=2),
            _attempt("wrong-1", "b", [1, 5], success=False),
            _attempt("wrong-2", "b", [1, 5], success=False),
            _attempt("alone", "b", [1, 6]),
        ]
    )
    assert harness.run(reject, {"keep": 1}, trajectories=[rows])["trajectories"].ids() == ["alone", "usual-1"]
    assert harness.run(reject, {"keep": 2}, trajectories=[rows])["trajectories"].ids() == ["alone", "lucky", "usual-1"]
    asked = harness.run(reject, {"keep": 2, "agree": 2}, trajectories=[rows])
    assert asked["trajectories"].ids() == ["usual-1"]
    assert (asked.metrics["tasks_solved"], asked.metrics["tasks_kept"]) == (2, 1)


def test_rejection_warns_if_a_bad_start_leaves_few_tasks(harness: Harness) -> None:
    poor = harness.trajectories([_attempt(f"run-{n}", f"task-{n}", [1, 2, n], success=n == 0) for n in range(20)])
    with pytest.warns(UserWarning, match="only 1 of 20 tasks have a success, .* needs a better start"):
        harness.run(reject, trajectories=[poor])
    good = harness.trajectories([_attempt(f"ok-{n}", f"task-{n}", [1, 2, n], success=n < 4) for n in range(20)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harness.run(reject, trajectories=[good])


def test_training_refuses_rows_of_another_tokenizer_and_empty_selections(harness: Harness, tmp_path: Path) -> None:
    llama().save(tmp_path / "llama")
    tasks = harness.run(generate, {"env": "lookup", "train": 8, "dev": 1, "heldout": 1})["train"]
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    tiny = {"model": {"init": "tiny"}, "steps": 1, "batch": 4}
    warm = harness.run(sft, tiny, trajectories=[expert])["model"]
    sampled = harness.run(sample, {"samples": 1, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"]
    other = {"model": {"path": str(tmp_path / "llama")}, "steps": 1}
    with pytest.raises(ValueError, match=r"sample-.* was tokenised by .*the model .*llama uses"):
        harness.run(sft, other, trajectories=[sampled])
    kept = harness.run(reject, trajectories=[sampled])["trajectories"]
    with pytest.raises(ValueError, match="nothing to train on"):
        harness.run(sft, {"steps": 1}, trajectories=[kept], model=warm)
    with pytest.raises(ValueError, match=r"inputs\.model or set with\.model"):
        harness.run(sft, {"steps": 1}, trajectories=[expert])


def test_rows_of_another_tokenizer_are_learned_from_their_messages(harness: Harness) -> None:
    """Tokens and masks are those of rows that never had tokens; a turn that was not trained on still is not, nor an
    answer that an opening shows, which has no span."""
    tasks = harness.run(generate, {"env": "lookup", "train": 8, "dev": 1, "heldout": 1})["train"]
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    config = {"steps": 1, "batch": 4}
    model = harness.run(sft, {"model": {"init": "tiny"}, **config}, trajectories=[expert])["model"]
    teacher = llama()
    taught = [tokenize(row, teacher.codec, teacher.tokenizer_fingerprint) for row in expert.read()]
    named = [row.model_copy(update={"trajectory_id": f"t-{n}", "episode_id": f"t-{n}"}) for n, row in enumerate(taught)]
    begun = []
    for number, row in enumerate(named):
        first = next(message for message in row.messages if message.role is Role.ASSISTANT)
        mask = [trained and position >= (first.token_end or 0) for position, trained in enumerate(row.action_mask)]
        name = f"{row.trajectory_id}-b"
        update = {"trajectory_id": name, "episode_id": name, "action_mask": mask, "n_action_tokens": sum(mask)}
        bare = first.model_copy(update={"token_start": None, "token_end": None} if number % 2 else {})
        messages = [bare if message is first else message for message in row.messages]
        begun.append(row.model_copy(update={**update, "messages": messages}))

    def rows(trajectories: Trajectories, **more: str) -> list[dict[str, list[int]]]:
        made = harness.run(sft, {**config, **more}, trajectories=[trajectories], model=model)
        assert made.metrics.get("tokenised_again") == (8 if more else None)
        return made["rows"].table().select(["input_ids", "mask"]).to_pylist()  # type: ignore[no-any-return]

    plain, again = rows(expert), rows(harness.trajectories(named), tokens="again")
    assert sorted(again, key=str) == sorted(plain, key=str)
    later = {str(row["input_ids"]): sum(row["mask"]) for row in rows(harness.trajectories(begun), tokens="again")}
    assert all(0 < later[str(row["input_ids"])] < sum(row["mask"]) for row in plain)
    with pytest.raises(ValueError, match="tokens: again makes other tokens than those that prefixes: trained"):
        harness.run(sft, {**config, "tokens": "again", "prefixes": "trained"}, trajectories=[expert], model=model)


def test_rationalised_rows_carry_no_hint(harness: Harness) -> None:
    """A policy that knows hints solves some tasks with them; what is selected has the plain question."""
    tasks = harness.run(generate, {"env": "lookup", "train": 12, "dev": 1, "heldout": 1})["train"]
    expert = harness.run(synthesize, {"hinted": 1.0, "noise": 0.0}, tasks=tasks)["trajectories"]
    config = {"model": {"init": "tiny"}, "steps": 80, "batch": 6, "optimizer": {"lr": 5e-3, "warmup": 10}}
    warm = harness.run(sft, config, trajectories=[expert])["model"]
    nothing = harness.run(reject, trajectories=[])["trajectories"]
    made = harness.run(rationalize, {"samples": 4}, model=warm, tasks=tasks, trajectories=[nothing])
    rows = made["trajectories"].read()
    assert made.metrics["dialect"] == "hermes"
    prompts = {task.task_id: task.prompt for task in tasks.read()}
    assert rows, "the memorised hints solve nothing: the test would pass on an empty selection"
    for row in rows:
        assert row.success
        assert row.source == "rationalized"
        assert row.messages[0].content == prompts[row.task_id]
        assert harness.buffer.get(row.parent_id).source == "hinted"


def test_negatives_teach_not_to_call_a_tool(harness: Harness, tmp_path: Path) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 12, "dev": 1, "heldout": 1})
    expert = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    talk = Trajectory(
        trajectory_id="talk-0", episode_id="talk-0", task_id="talk", source="imported", env="chat", split="train",
        prompt="Good morning", reward=0.0, success=False, termination=Termination.ANSWERED,
        messages=[Message(role=Role.USER, content="Hi"), Message(role=Role.ASSISTANT, content="Good morning.")],
    )  # fmt: skip
    made = harness.run(negatives, {"share": 1.0, "refusal": "No."}, trajectories=[expert, harness.trajectories([talk])])
    assert made.metrics == {"without_tools": 12, "with_unneeded_tools": 1}
    rows = made["trajectories"].read()
    bare, offered = rows[0], rows[-1]
    assert (bare.tools, bare.source, bare.parent_id) == ("[]", "negative", expert.read()[0].trajectory_id)
    assert [message.content for message in bare.messages] == [expert.read()[0].prompt, "No."]
    assert offered.tools == expert.read()[0].tools
    assert {row.task_id for row in rows}.isdisjoint(row.task_id for row in expert.read())
    assert [message.content for message in offered.messages] == ["Hi", "Good morning."]

    config = {"model": {"path": str(tmp_path / "shows")}, "steps": 2, "batch": 4}
    policy = llama()
    policy.tokenizer.chat_template = "{% if tools %}{{ tools }}{% endif %}" + policy.tokenizer.chat_template
    policy.save(tmp_path / "shows")
    trained = harness.run(sft, config, trajectories=[expert, made["trajectories"]])
    assert trained.metrics["rows"] == 25
    policy.tokenizer.chat_template = HIDES_TOOLS  # told in the system message, unless an agent of tags is chosen
    policy.save(tmp_path / "hides")
    hides = config | {"model": {"path": str(tmp_path / "hides"), "dialect": "search_r1"}}
    with pytest.raises(ValueError, match="template that renders tools"):
        harness.run(sft, hides, trajectories=[made["trajectories"]])
    with pytest.raises(ValueError, match="no trajectory calls a tool"):
        harness.run(negatives, trajectories=[harness.trajectories([talk.model_copy(update={"trajectory_id": "t"})])])
