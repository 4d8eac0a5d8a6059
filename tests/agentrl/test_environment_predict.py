"""Predictions of observations: how they are scored."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.predict import Predict, rouge_l
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role


def test_rouge_by_hand() -> None:
    """Of "police killed the gunman" and "police kill the gunman", three of four words are in order (Lin 2004, without
    "the", which is not counted here: two of three)."""
    assert rouge_l("police kill gunman", "police killed gunman") == pytest.approx(2 / 3)
    assert rouge_l("gunman police", "police gunman") == pytest.approx(1 / 2)
    assert rouge_l("The attic.", "attic") == 1.0
    assert rouge_l("", "attic") == 0.0
    assert rouge_l("", "") == 1.0


words = st.lists(st.sampled_from(["attic", "cave", "den", "go", "mill"]), max_size=8).map(" ".join)


@given(words, words)
def test_rouge_is_symmetric_and_one_only_for_equal_words(first: str, other: str) -> None:
    assert rouge_l(first, other) == pytest.approx(rouge_l(other, first))
    assert 0 <= rouge_l(first, other) <= 1
    assert (rouge_l(first, other) == pytest.approx(1.0)) == (first == other)


def scored(environment: Predict, truth: Any, text: str | None) -> Any:
    task = Task(task_id="p", env="predict", split="train", prompt="?", ground_truth=json.dumps(truth))

    async def go() -> Any:
        episode = await environment.reset(task)
        if text is not None:
            await episode.step(Message(role=Role.ASSISTANT, content=text))
        return await episode.score()

    return blocking(go())


@pytest.mark.parametrize(
    ("tau", "message", "reward"),
    [(0.0, "one two three", 1.0), (0.0, "one two four", 0.0), (0.4, "one two four", 1.0), (0.3, "one two four", 0.0)],
)
def test_a_prediction_is_right_within_tau(tau: float, message: str, reward: float) -> None:
    score = scored(Predict(tau=tau), "one two three", message)
    assert (score.reward, score.success) == (reward, bool(reward))
    assert score.state["similarity"] == pytest.approx(1.0 if message.endswith("three") else 2 / 3)


def test_one_of_several_observations_is_enough_and_silence_is_wrong() -> None:
    assert scored(Predict(), ["left", "right"], "right").success
    assert not scored(Predict(tau=0.99), "left", None).success


@pytest.mark.slow
def test_an_embedding_scores_by_the_cosine(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "cat": 1, "dog": 2, "car": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    import numpy as np

    vectors = np.array([[0, 0, 1], [1, 0, 0], [0.8, 0.6, 0], [0, 1, 0]], np.float32)
    static = modules.StaticEmbedding(tokenizer, embedding_weights=vectors)
    sentence_transformers.SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path / "model"))
    environment = Predict(tau=0.25, similarity="embedding", model=str(tmp_path / "model"))
    assert scored(environment, "cat", "dog").state["similarity"] == pytest.approx(0.8, abs=1e-5)
    assert scored(environment, "cat", "dog").success
    assert not scored(environment, "cat", "car").success


@pytest.mark.parametrize("settings", ['{"similarity": "embedding"}', '{"model": "some/model"}', '{"tau": 1.0}'])
def test_settings_that_cannot_work_are_refused(settings: str) -> None:
    with pytest.raises(ValueError, match="predict"):
        load_environment(f"predict{settings}")


def test_its_tasks_are_made_of_rollouts() -> None:
    with pytest.raises(ValueError, match=r"tasks\.predict"):
        Predict().tasks({"train": 1}, 0)
