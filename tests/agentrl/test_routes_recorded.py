"""Routes that engines record: the embedded one, and vLLM as its answers are documented."""

import asyncio
import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import FAMILIES, mixture

from agentrl.engines.base import EngineError, Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import EmbeddedConfig, OpenAIConfig, VLLMConfig
from agentrl.engines.replicas import ROUTES, RUNNER, ReplicaError, routes_of
from agentrl.engines.routes import RouteShape, recording, route_shape
from agentrl.engines.servers import Server, serving
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.policy import Policy

SAMPLING = Sampling(max_turn_tokens=12, max_tokens=120)


def passed(policy: Policy, ids: list[int]) -> np.ndarray:
    """What routers choose in one pass over some tokens."""
    with recording(policy.model) as recorded, torch.no_grad():
        policy.model(input_ids=torch.tensor(ids)[None])
    return torch.stack(recorded, 1).numpy()


def check(policy: Policy, session: Session) -> None:
    """A session's routes are those of all its tokens but the last, as in one pass."""
    assert session.routed == len(session.ids) - 1
    wanted = passed(policy, session.ids)[:-1]
    given = np.concatenate(session.routes)
    assert given.dtype == np.uint8
    assert (np.sort(given) == np.sort(wanted)).all()


async def _played(engine: TransformersEngine, size: int) -> list[Session]:
    """Two turns of each session of two groups, in one of which a session forks after its first turn."""
    random = np.random.default_rng(1)
    prompts = [random.integers(5, size, length).tolist() for length in (9, 23)]

    async def end(session: Session, seed: int) -> Session:
        session.act(await engine.turn(session, SAMPLING, stop=[3], seed=seed))
        session.end()
        return session

    async def play(number: int, prompt: list[int]) -> list[Session]:
        session = engine.open((number,), root=str(number % 2))
        session.observe(prompt)
        session.act(await engine.turn(session, SAMPLING, stop=[3], seed=number))
        session.observe(prompt[:5])
        forks = [session.fork((number, 1))] if number == 2 else []
        return await asyncio.gather(*(end(each, 100 + n) for n, each in enumerate([session, *forks], number)))

    parts = await asyncio.gather(*(play(number, prompts[number % 2]) for number in range(6)))
    return [session for part in parts for session in part]


@pytest.mark.parametrize(("kind", "schedule"), zip(FAMILIES, ("free", "exact", "exact"), strict=True))
def test_the_embedded_engine_records_the_routes_of_its_own_passes(kind: str, schedule: Any) -> None:
    policy = mixture(kind)
    engine = EmbeddedConfig(schedule=schedule, rows=5).with_routes().build(policy)
    assert isinstance(engine, TransformersEngine)
    sessions = blocking(_played(engine, policy.model.config.vocab_size))
    assert len(sessions) == 7
    for session in sessions:
        check(policy, session)
    plain = blocking(_played(TransformersEngine(policy.model, 5, schedule), policy.model.config.vocab_size))
    assert [session.ids for session in plain] == [session.ids for session in sessions]
    assert all(session.routed == 0 for session in plain)


def test_a_session_forgets_the_routes_of_what_it_forgets() -> None:
    session = Session()
    session.observe([1, 2, 3])
    for ids, tokens in (([4, 5], 4), ([6, 7, 8], 3)):
        session.act(Turn(ids, [0.0] * len(ids), [], "stop", routes=np.full((tokens, 1, 2), len(session.ids))))
    assert session.routed == 7
    session.forget(5)
    assert [len(routes) for routes in session.routes] == [4, 1]
    session.forget(2)
    assert [len(routes) for routes in session.routes] == [2]


def test_routes_are_refused_of_engines_and_models_that_have_none() -> None:
    from architectures import qwen

    with pytest.raises(ValueError, match=r"engine\.type: openai does not return routes"):
        OpenAIConfig(model="m").with_routes()
    with pytest.raises(ValueError, match=r"\(qwen3\) has no routers of experts"):
        EmbeddedConfig().with_routes().build(qwen())


# -- vLLM, whose CPU build cannot return routes: what it answers is made as its documentation says


def answer(routes: np.ndarray | None) -> dict[str, Any]:
    """A choice of ``/inference/v1/generate``: the experts are a numpy file in base64."""
    file = io.BytesIO()
    if routes is not None:
        np.save(file, routes)
    return {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        "routed_experts": None if routes is None else base64.b64encode(file.getvalue()).decode(),
    }


SHAPE = RouteShape((1, 2), 2, 8)
"""The first layer has no router, as in DeepSeek-V3."""


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
def test_a_turn_of_a_server_has_the_routes_of_its_layers(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.engines.replicas import Request

    random = np.random.default_rng(0)
    given = random.integers(0, 8, (4, 3, 2)).astype(dtype)

    async def generate(server: Server, body: dict[str, Any]) -> dict[str, Any]:
        assert body["sampling_params"]["routed_experts_prompt_start"] == 2
        return {"choices": [answer(given)]}

    monkeypatch.setattr(Server, "_generate", generate)
    request = Request([1, 2, 3, 4, 5], {"routed_experts_prompt_start": 2}, 0)
    turn = blocking(Server("http://nowhere").sample(request, None))
    assert turn is not None
    routes = routes_of(turn, SHAPE, 5 + 2 - 1 - 2)
    assert routes is not None
    assert routes.dtype == np.uint8
    assert (routes == given[:, 1:]).all()


def test_routes_of_a_server_that_do_not_fit_are_an_error() -> None:
    def turn(routes: np.ndarray | None, stop: Any = "stop") -> Turn:
        return Turn([7, 8], [0.0, 0.0], [], stop, routes=routes)

    with pytest.raises(EngineError, match=f"{ROUTES} and {RUNNER}=1"):
        routes_of(turn(None), SHAPE, 4)
    assert routes_of(turn(None, "cut"), SHAPE, 4) is None
    short = np.zeros((3, 3, 2), np.uint8)
    cut = routes_of(turn(short, "cut"), SHAPE, 4)
    assert cut is not None
    assert len(cut) == 3
    for tokens in (2, 4):
        with pytest.raises(ReplicaError, match=f"routes of 3 tokens, not {tokens}"):
            routes_of(turn(short), SHAPE, tokens)
    with pytest.raises(ReplicaError, match="of another model"):
        routes_of(turn(short + 8), SHAPE, 3)


def test_servers_that_are_started_return_routes_by_the_runner_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def engine(policy: Policy, replicas: list[Server], *given: Any) -> None:
        made.update(options=replicas[0].options, shape=given[-1])

    monkeypatch.setattr("agentrl.engines.vllm.VLLMEngine", engine)
    policy = mixture("mixtral")
    VLLMConfig().with_routes().build(policy)
    assert ROUTES in made["options"]
    assert made["shape"] == route_shape(policy.model)
    assert serving(made["options"])[RUNNER] == "1"
    VLLMConfig().build(policy)
    assert ROUTES not in made["options"]
    assert RUNNER not in serving(made["options"])
