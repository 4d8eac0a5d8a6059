import asyncio
import math
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from architectures import POLICIES, lookup_tasks
from engine_rows import prompts_of, recomputed, scripted, stops

from agentrl.engines.base import EngineError, Sampling, Session, Turn, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import EmbeddedConfig
from agentrl.engines.decoding import CacheSlot, CacheSlots
from agentrl.engines.kv_cache import KVCache
from agentrl.engines.transformers import TransformersEngine
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.trajectory import Message, Role, Span, ToolCall


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


@pytest.mark.parametrize("schedule", ["exact", "free"])
@pytest.mark.parametrize(("max_rows", "temperature"), [(3, 1.0), (64, 0.7)])
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(
    policy: Policy, max_rows: int, temperature: float, schedule: str
) -> None:
    """Proves slots, positions, masks, chunks, copied prompts, moved and evicted rows all at once."""
    engine = TransformersEngine(policy.model, max_rows, schedule)  # type: ignore[arg-type]
    rows = scripted(policy, engine, Sampling(temperature=temperature, max_turn_tokens=12, max_tokens=80))
    assert sum(any(row.mask[:-12]) for row in rows) > 5, "some rows have several turns"
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.logprobs)
        expected = recomputed(policy, row.ids, temperature)
        for flag, recorded, value in zip(row.mask, row.logprobs, expected, strict=True):
            assert math.isnan(recorded) != flag
            if flag:
                assert recorded == pytest.approx(value, abs=2e-4)


def test_no_token_is_computed_twice_and_a_groups_prompt_once(policy: Policy) -> None:
    engine = TransformersEngine(policy.model)
    rows = scripted(policy, engine, Sampling(max_turn_tokens=12, max_tokens=80))
    shared = sum(len(prompt) - 1 for prompt in prompts_of(policy))
    assert engine.work.copied == shared
    assert engine.work.computed == sum(len(row.ids) - 1 for row in rows) - shared


def test_an_exact_schedule_gives_the_same_tokens_and_logprobs_to_the_bit(policy: Policy) -> None:
    """Whatever the tools' times are."""
    sampling, prompts = Sampling(max_turn_tokens=8, max_tokens=70), prompts_of(policy)

    def rows(delays: Sequence[float], seed: int) -> list[tuple[list[int], bytes]]:
        engine = TransformersEngine(policy.model)

        async def one(number: int) -> Session:
            with engine.open((number,)) as session:
                session.observe(prompts[number])
                for turn in range(3):
                    session.act(await engine.turn(session, sampling, stop=stops(policy), seed=seed + number))
                    await asyncio.sleep(delays[number])
                    session.observe(prompts[turn][: 2 + number])
            return session

        async def go() -> list[Session]:
            return await asyncio.gather(*(one(number) for number in range(12)))

        made = blocking(go())
        return [(row.ids, torch.tensor(row.logprobs).numpy().tobytes()) for row in made]

    forward, backward = [n * 0.002 for n in range(12)], [(11 - n) * 0.002 for n in range(12)]
    assert rows(forward, 1) == rows(backward, 1)
    assert [ids for ids, _ in rows(forward, 1)] != [ids for ids, _ in rows(forward, 2)]


@pytest.mark.parametrize("schedule", ["exact", "free"])
def test_only_the_exact_schedule_waits_for_tools(policy: Policy, schedule: str) -> None:
    engine = EmbeddedConfig(schedule=schedule).build(policy)  # type: ignore[arg-type]
    assert engine.reproducible == (schedule == "exact")
    ended: list[str] = []
    [prompt, *_] = prompts_of(policy)

    async def one(name: str, turns: int, pause: float) -> None:
        with engine.open() as session:
            session.observe(prompt)
            for _ in range(turns):
                session.act(await engine.turn(session, Sampling(max_turn_tokens=2), stop=[], seed=0))
                await asyncio.sleep(pause)
        ended.append(name)

    async def go() -> None:
        await asyncio.gather(one("one turn and a slow tool", 1, 2.0), one("five turns", 5, 0.0))

    blocking(go())
    assert (ended[0] == "five turns") == (schedule == "free")


def test_no_more_rows_than_allowed_are_in_the_cache(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = CacheSlots.take

    def noted(cache_slots: CacheSlots, session: Session) -> CacheSlot | None:
        cache_slot = take(cache_slots, session)
        taken.append(cache_slots.slots)
        return cache_slot

    monkeypatch.setattr(CacheSlots, "take", noted)
    for rows in (2, 5):
        engine = EmbeddedConfig(rows=rows).build(policy)
        taken.clear()  # what tried the engine out is not meant
        scripted(policy, engine, Sampling(max_turn_tokens=4, max_tokens=80))  # type: ignore[arg-type]
        assert max(taken) == rows


def test_greedy_equals_generate_of_the_library(policy: Policy) -> None:
    engine, sampling = TransformersEngine(policy.model), Sampling(temperature=0, max_turn_tokens=10)

    async def one(prompt: list[int]) -> Turn:
        with engine.open() as session:
            session.observe(prompt)
            return await engine.turn(session, sampling, stop=[], seed=0)

    async def go() -> list[Turn]:
        return await asyncio.gather(*map(one, prompts_of(policy)))

    for prompt, turn in zip(prompts_of(policy), blocking(go()), strict=True):
        expected = policy.model.generate(
            torch.tensor([prompt], device=policy.model.device), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        assert prompt + turn.ids == expected[0].tolist()
        assert turn.stop == "length"


def test_labels_are_true_if_weights_change_within_a_turn() -> None:
    """Each span, scored with the weights of its version, gives its recorded log-probs. Rows of a task share the prompt
    with the new weights too."""
    policy, other = POLICIES["qwen"](), POLICIES["qwen"]()
    for parameter in other.model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(
            parameter.device
        )
    first = {name: value.clone() for name, value in policy.model.state_dict().items()}
    engine, prompts = TransformersEngine(policy.model, schedule="free"), prompts_of(policy)
    prompts = [(prompt * 100)[:100] for prompt in prompts[:2]]

    async def one(number: int) -> Session:
        with engine.open((number,), f"task-{number % 2}") as session:
            session.observe(prompts[number % 2])
            session.act(await engine.turn(session, Sampling(max_turn_tokens=40), stop=[], seed=number))
        return session

    async def change() -> None:
        while engine.work.steps < 15:
            await asyncio.sleep(0)
        await engine.load(Weights(7, other.model))

    async def go() -> list[Session]:
        *rows, _ = await asyncio.gather(*(one(number) for number in range(6)), change())
        return rows

    rows = blocking(go())
    drawn = sum(row.spans[0].end - row.spans[0].start for row in rows)
    assert engine.work.computed - engine.work.sampled <= 2 * 2 * 100 + drawn
    versions = {7: other.model.state_dict(), 0: first}
    assert {tuple(span.version for span in row.spans) for row in rows} == {(0, 7)}
    for row in rows:
        for span in row.spans:
            policy.model.load_state_dict(versions[span.version])
            expected = recomputed(policy, row.ids)[span.start : span.end]
            assert row.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-3)


def test_a_copy_that_does_not_give_the_log_probs_of_its_source_is_an_error() -> None:
    """What a state does not hold, such as the frequencies of rotary positions, is not copied."""
    own, other = POLICIES["qwen"]().model, POLICIES["qwen"]().model
    engine = TransformersEngine(own)
    blocking(engine.load(Weights(1, other)))
    other.model.rotary_emb.inv_freq.mul_(3)
    with pytest.raises(EngineError, match="other log-probs with version 2 than the model that was trained"):
        blocking(engine.load(Weights(2, other)))


def test_a_fork_equals_its_parent_up_to_the_fork_and_costs_its_own_tokens(policy: Policy) -> None:
    engine, prompt, sampling = TransformersEngine(policy.model), prompts_of(policy)[0], Sampling(max_turn_tokens=9)

    async def go() -> tuple[Session, list[Session], int]:
        with engine.open((0,)) as parent:
            parent.observe(prompt)
            parent.act(await engine.turn(parent, sampling, stop=[], seed=1))
            before = engine.work.computed
            children = [parent.fork((n,)) for n in range(3)]
            parent.end()

            async def extend(child: Session) -> None:
                with child:
                    child.act(await engine.turn(child, sampling, stop=[], seed=50 + child.key[0]))

            await asyncio.gather(*map(extend, children))
        return parent, children, before

    # the parent's cache is gone once it has ended, so the children share through the first of them
    parent, children, before = blocking(go())
    shared = len(parent.ids)
    assert {tuple(child.ids[:shared]) for child in children} == {tuple(parent.ids)}
    assert len({tuple(child.ids) for child in children}) == 3
    assert engine.work.computed - before == (shared - 1) + 3 * 9
    for child in children:
        expected = recomputed(policy, child.ids)
        assert child.logprobs[len(prompt) :] == pytest.approx(expected[len(prompt) :], abs=2e-4)


def test_scores_are_those_of_a_plain_forward_pass(policy: Policy) -> None:
    ids = prompts_of(policy)[0]
    logprobs = blocking(TransformersEngine(policy.model).score(ids, start=3))
    assert logprobs == pytest.approx(recomputed(policy, ids)[3:], abs=1e-5)


def test_limits_hold(policy: Policy) -> None:
    for row in scripted(policy, TransformersEngine(policy.model), Sampling(max_turn_tokens=5, max_tokens=100)):
        assert len(row.ids) <= 100
        runs = "".join("x" if flag else " " for flag in row.mask).split()
        assert max(map(len, runs)) <= 5


def test_a_turn_is_cut_in_time_and_keeps_what_it_said(policy: Policy) -> None:
    engine = TransformersEngine(policy.model, schedule="free")

    async def go() -> Turn:
        with engine.open() as session:
            session.observe(prompts_of(policy)[0])
            long = Sampling(max_turn_tokens=100_000, max_tokens=200_000)
            return await engine.turn(session, long, stop=[], seed=0, time_limit=0.3)

    turn = blocking(go())
    assert turn.stop == "cut"
    assert 0 < len(turn.ids) == len(turn.logprobs) == turn.spans[-1].end


def test_a_cancelled_turn_has_changed_nothing(policy: Policy) -> None:
    engine, prompt = TransformersEngine(policy.model, schedule="free"), prompts_of(policy)[0]

    async def go() -> tuple[Session, Session]:
        with engine.open((0,)) as session, engine.open((1,)) as other:
            session.observe(prompt)
            other.observe(prompt)
            neighbour = asyncio.create_task(engine.turn(other, Sampling(max_turn_tokens=30), stop=[], seed=3))
            asked = asyncio.create_task(engine.turn(session, Sampling(max_turn_tokens=30), stop=[], seed=1))
            while engine.work.steps < 5:
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert session.ids == prompt
            session.act(await engine.turn(session, Sampling(max_turn_tokens=30), stop=[], seed=2))
            other.act(await neighbour)
        return session, other

    for row in blocking(go()):
        assert row.logprobs[len(prompt) :] == pytest.approx(recomputed(policy, row.ids)[len(prompt) :], abs=2e-4)


def asked_by_two(policy: Policy, engine: TransformersEngine, token: int) -> list[Turn | BaseException]:
    """The turns of two sessions at once, the second of which has ``token`` before its prompt."""
    prompt = prompts_of(policy)[0]

    async def ask(number: int) -> Turn:
        with engine.open((number,)) as session:
            session.observe([token, *prompt] if number else prompt)
            return await engine.turn(session, Sampling(max_turn_tokens=3), stop=[], seed=0)

    async def both() -> list[Turn | BaseException]:
        return await asyncio.gather(ask(0), ask(1), return_exceptions=True)

    return blocking(both())


@pytest.mark.parametrize(
    ("error", "advice"),
    [(IndexError("index 7"), "IndexError: index 7"), (torch.OutOfMemoryError("48 MiB"), "engine.rows")],
)
def test_a_model_that_fails_says_so_to_all_and_can_be_used_again(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    engine = TransformersEngine(policy.model)
    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "forward", Mock(side_effect=error))
        failed = asked_by_two(policy, engine, 6)
    assert all(isinstance(item, EngineError) and advice in str(item) for item in failed)
    assert all(isinstance(item, Turn) for item in asked_by_two(policy, engine, 6))


@pytest.mark.parametrize("token", [10**6, -1])
def test_a_token_that_the_model_has_not_is_refused_alone(policy: Policy, token: int) -> None:
    """A GPU would fail for good."""
    engine = TransformersEngine(policy.model)
    turn, error = asked_by_two(policy, engine, token)
    assert isinstance(turn, Turn)
    assert isinstance(error, EngineError)
    assert f"token {token} is none of the model's" in str(error)
    with pytest.raises(EngineError, match="another tokenizer"):
        blocking(engine.score([1, token]))


def test_top_k_and_top_p_draw_only_what_they_allow(policy: Policy) -> None:
    for sampling in (Sampling(top_k=1, max_turn_tokens=6), Sampling(top_p=1e-6, max_turn_tokens=6)):
        rows = scripted(policy, TransformersEngine(policy.model), sampling)
        assert all(value == pytest.approx(0) for row in rows for value in row.logprobs if not math.isnan(value))


def test_rollouts_are_whole_and_aligned(policy: Policy) -> None:
    tasks = lookup_tasks(12)
    rollouts = RolloutRunner(
        policy, TransformersEngine(policy.model), load_environment("lookup"), Sampling(max_tokens=90)
    )
    rows = rollouts.run([Attempt(task, 1) for task in tasks], 0, [f"r-{n}" for n in range(12)])
    for task, row in zip(tasks, rows, strict=True):
        assert row.task_id == row.group_id == task.task_id
        assert row.sample_index == 1
        assert row.n_tokens == len(row.input_ids) == len(row.action_mask) == len(row.logprobs)
        assert row.n_steps == sum(message.role == "assistant" for message in row.messages)
        assert row.tokenizer == policy.tokenizer_fingerprint
        for message in row.messages:
            if message.role is Role.ASSISTANT and message.token_end:
                assert all(row.action_mask[message.token_start : message.token_end])


def test_a_row_that_ends_where_an_observation_does_not_fit_says_each_turn_once(policy: Policy) -> None:
    task = lookup_tasks(1)[0]
    turn = policy.codec.assistant(
        Message(role=Role.ASSISTANT, content="", tool_calls=[ToolCall(id="call_0", name="find", arguments="{}")])
    )

    class SaysOneTurn(TransformersEngine):
        async def turn(self, *args: object, **options: object) -> Turn:
            return Turn(turn, [-1.0] * len(turn), [Span(version=0, start=0, end=len(turn))], "stop")

    opening = len(policy.codec.opening([Message(role=Role.USER, content=task.prompt)], task.tools))
    sampling = Sampling(max_tokens=opening + len(turn) + 2)
    runner = RolloutRunner(policy, SaysOneTurn(policy.model), load_environment("lookup"), sampling)
    [row] = runner.run([Attempt(task)], 0, ["r"])
    assert [message.role for message in row.messages] == ["user", "assistant", "tool"]
    assert (row.n_steps, row.n_tool_calls, row.termination) == (1, 1, "max_tokens")


def test_a_saved_policy_speaks_as_before(policy: Policy, tmp_path: object) -> None:
    policy.save(tmp_path)  # type: ignore[arg-type]
    loaded = Policy.load(str(tmp_path))
    assert loaded.tokenizer_fingerprint == policy.tokenizer_fingerprint
    ids = torch.tensor([prompts_of(policy)[0]])
    assert torch.equal(loaded.model(ids).logits, policy.model(ids).logits)


def test_a_missing_model_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"model '\./nowhere' cannot be loaded.*Give a folder"):
        Policy.load("./nowhere")
