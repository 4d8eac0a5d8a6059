"""Episodes meet tools and environments that fail in every way, and none takes another with it."""

import asyncio
import gc
import itertools
import json
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from architectures import qwen
from faulty_shop import Broken, BrokenVisit, ForgetfulShop, Shop, Speaker, Visit, task

from agentrl.datastore.table.row_digests import contents
from agentrl.engines.base import Sampling
from agentrl.engines.blocking import Background, blocking
from agentrl.environments.adapted import protocol
from agentrl.environments.base import Step, tool_message
from agentrl.environments.forks import rebuild
from agentrl.environments.hosts import Threads
from agentrl.environments.tools import schemas
from agentrl.models.policy import Policy
from agentrl.rollouts.in_flight import NumberedAttempt
from agentrl.rollouts.limits import Retry
from agentrl.rollouts.runner import Attempt, Limits, RolloutRunner
from agentrl.schemas.arrow import to_table
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Role, Termination, ToolCall, Trajectory

ROOM = Sampling(max_turn_tokens=400, max_tokens=6000)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen()


def runner(policy: Policy, environment: Any, seconds: float = 0.0, **limits: Any) -> RolloutRunner:
    once = Limits(retry=Retry(attempts=1), **limits)
    return RolloutRunner(policy, Speaker(policy.codec, seconds), environment, ROOM, limits=once)


def play(runner: RolloutRunner, *prompts: str, env: str = "shop") -> list[Trajectory]:
    attempts = [Attempt(task(prompt, env, number)) for number, prompt in enumerate(prompts)]
    return runner.run(attempts, 0, [f"r-{number}" for number in range(len(prompts))])


def answers(row: Trajectory) -> list[str]:
    return [message.content for message in row.messages if message.role is Role.TOOL]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_tool_that_hangs_raises_or_floods_is_an_observation_and_counted(policy: Policy, processes: int) -> None:
    acts = runner(policy, Shop(), tool_s=1.0, observation_chars=500, processes=processes)
    started = time.monotonic()
    hung, raised, flooded, fine = play(acts, "price fig,hang,price plum", "burst", "flood", "price apple")
    assert time.monotonic() - started < 30
    assert [row.termination for row in (hung, raised, flooded, fine)] == [Termination.ANSWERED] * 4
    assert all(row.success for row in (hung, raised, flooded, fine))
    assert answers(hung) == ["3", "hang took longer than 1 s and was stopped", "4"]
    assert json.loads(hung.final_state) == {"asked": ["fig", "plum"]}, "a new process made the calls again"
    assert answers(raised) == ["burst failed: ValueError: out of stock"]
    assert answers(flooded) == ["x" * 454 + "\n[cut here: the whole has 50000000 characters]"]
    assert (hung.n_tool_calls, hung.n_tool_errors, raised.n_tool_errors, flooded.n_tool_errors) == (3, 1, 1, 0)
    assert [row.tags for row in (hung, raised, flooded, fine)] == [
        ["tool_timeouts:1"], ["tool_exceptions:1"], ["observations_cut:1"], [],
    ]  # fmt: skip
    assert acts.counts == {"tool_timeouts": 1, "tool_exceptions": 1, "observations_cut": 1}
    assert not children()


class Stuck(Broken):
    """Its tool, a coroutine, never returns."""

    async def reset(self, task: Task) -> "StuckVisit":
        return StuckVisit(task)


class StuckVisit(BrokenVisit):
    tools = json.dumps([{"type": "function", "function": {"name": "wait", "parameters": {}}}])

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            await asyncio.Event().wait()
        return Step(done=True)


def test_a_coroutine_that_hangs_as_a_tool_is_an_observation_and_counted(policy: Policy) -> None:
    acts = runner(policy, Stuck(), tool_s=0.3)
    [row] = play(acts, "wait,wait,done", env="broken")
    assert answers(row) == ["wait took longer than 0.3 s"] * 2
    assert [0.3 <= seconds < 5 for seconds in (row.message_seconds or [])[2::2] if seconds is not None] == [True] * 2
    assert [message.error for message in row.messages if message.role is Role.TOOL] == [True, True]
    assert (row.termination, row.success, row.tags) == (Termination.ANSWERED, True, ["tool_timeouts:2"])
    assert (row.n_tool_calls, row.n_tool_errors, acts.counts) == (2, 2, {"tool_timeouts": 2})


def test_rows_say_how_long_their_turns_and_calls_took_and_no_digest_counts_it(policy: Policy) -> None:
    [slow, *again] = [play(runner(policy, Shop(), 0.05), "price fig,slow")[0] for _ in range(2)]
    roles = [message.role for message in slow.messages]
    assert roles == [Role.USER, *[Role.ASSISTANT, Role.TOOL] * 2, Role.ASSISTANT]
    user, *seconds = slow.message_seconds or []
    assert user is None
    turns, (price, waited) = [float(known or 0) for known in seconds[::2]], seconds[1::2]
    assert all(0.05 <= turn < 5 for turn in turns)
    assert waited is not None
    assert price is not None
    assert 0 <= price < 0.2 <= waited < 5
    assert [row.message_seconds for row in again] != [slow.message_seconds]
    first, second = contents(to_table([slow, *again], TRAJECTORY_SCHEMA)).to_pylist()
    assert first == second


def test_seconds_of_calls_that_nobody_measured_one_by_one_are_null() -> None:
    answers = [tool_message(ToolCall(id=name, name="wait", arguments="{}"), "there") for name in "ab"]
    assert Step(answers).timed(1.5).known(3) == {}
    assert Step(answers, seconds=[0.5, None]).timed(1.5).known(3) == {3: 0.5}
    assert Step(answers[:1]).timed(1.5).known(3) == {3: 1.5}
    assert Step([Message(role=Role.USER, content="and?")]).timed(1.5).known(3) == {}


def test_an_episode_whose_state_went_with_its_process_ends_alone(policy: Policy) -> None:
    acts = runner(policy, ForgetfulShop(), tool_s=1.0, processes=2)
    lost, fine = play(acts, "price fig,hang,price plum", "price fig")
    assert (lost.termination, lost.reward, fine.success) == (Termination.ENV_ERROR, None, True)
    assert "set replayable = True" in lost.tags[-1]
    assert acts.counts["env_errors"] == 1


def test_wrong_calls_of_typed_tools_say_what_is_wrong(policy: Policy) -> None:
    [row] = play(runner(policy, Shop()), "price,price fig")
    assert answers(row) == ["price: item: Field required", "3"]
    [price, *_] = json.loads(schemas(Visit(task(""))))
    assert price["function"]["name"] == "price"
    assert price["function"]["description"] == "The price of an item."
    assert price["function"]["parameters"]["properties"] == {"item": {"type": "string"}}
    assert price["function"]["parameters"]["required"] == ["item"]


def test_a_failing_environment_ends_its_own_episode_with_the_traceback_in_its_tags(policy: Policy) -> None:
    acts = runner(policy, Broken(), tool_s=0.3)
    rows = play(acts, "reset", "step", "score", "close", "forever", "fine", env="broken")
    *failed, fine = rows
    assert [row.termination for row in failed] == [Termination.ENV_ERROR] * 5
    assert {(row.reward, row.success) for row in failed} == {(None, None)}
    texts = ["OSError: no such database", "lost row", "no items", "still open", "TimeoutError"]
    assert all(text in row.tags[-1] and "Traceback" in row.tags[-1] for text, row in zip(texts, failed, strict=True))
    assert (fine.termination, fine.reward, fine.tags) == (Termination.ANSWERED, 1.0, [])
    assert acts.counts == {"env_errors": 5}
    assert rows[1].n_action_tokens > 0, "what was said before the failure is kept"


def test_user_turns_and_rewards_of_steps_are_kept(policy: Policy) -> None:
    [row] = play(runner(policy, Broken()), "talk,talk,bye", env="broken")
    assert [message.role for message in row.messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert [message.reward for message in row.messages if message.role is Role.ASSISTANT] == [0.5, 0.5, None]
    assert row.n_steps == 3
    for message in row.messages:
        inside = row.action_mask[message.token_start : message.token_end]
        assert inside
        assert set(inside) == {message.role is Role.ASSISTANT}


def test_an_episode_that_takes_too_long_is_cut_and_kept(policy: Policy) -> None:
    limits = {"episode_s": 0.5, "tool_s": 5.0}
    long, short = play(runner(policy, Shop(), **limits), ",".join(["slow"] * 40), "price fig")
    assert (long.termination, short.termination) == (Termination.TIME_LIMIT, Termination.ANSWERED)
    assert 1 <= long.n_steps < 10
    assert long.n_tokens == len(long.input_ids) > 0


def test_an_environment_that_hangs_in_any_method_ends_its_own_episode(policy: Policy) -> None:
    acts = runner(policy, Broken(), environment_s=0.3)
    started = time.monotonic()
    *hung, fine = play(acts, "reset hangs", "score hangs", "close hangs", "fine", env="broken")
    assert time.monotonic() - started < 30
    assert [row.termination for row in hung] == [Termination.ENV_ERROR] * 3
    assert all("TimeoutError" in row.tags[-1] for row in hung)
    assert fine.success


@pytest.mark.parametrize(("limit", "steps"), [(None, 32), (2, 2), (40, 40)])
def test_an_episode_ends_after_so_many_messages(policy: Policy, limit: int | None, steps: int) -> None:
    [row] = play(runner(policy, Broken(), max_steps=limit), "talk for ever", env="broken")
    assert (row.termination, row.n_steps) == (Termination.MAX_STEPS, steps)
    [row] = play(runner(policy, Shop(), max_steps=limit), ",".join(["price fig"] * 50))
    assert (row.termination, row.n_steps) == (Termination.MAX_STEPS, steps)


def test_tools_run_beside_each_other_and_never_block_the_loop(policy: Policy) -> None:
    acts, beats = runner(policy, Shop()), []

    async def heart() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def go() -> float:
        heartbeat = asyncio.create_task(heart())
        started = time.monotonic()
        attempts = [Attempt(task("slow", number=number)) for number in range(32)]
        groups = [group async for group in acts.groups(attempts, 0, [f"r-{n}" for n in range(32)])]
        heartbeat.cancel()
        assert len(groups) == 32
        return time.monotonic() - started

    assert blocking(go()) < 3.0, "one after the other it would take 6.4 s"
    assert max(after - before for before, after in itertools.pairwise(beats)) < 0.5


def test_a_group_is_released_when_it_is_whole(policy: Policy) -> None:
    prompts = {"a": ["price fig", "slow,slow"], "b": ["price fig", "price fig"]}
    attempts = [
        Attempt(task(prompt, number=0), n, group=group)
        for group, two in prompts.items()
        for n, prompt in enumerate(two)
    ]

    async def go() -> list[list[str]]:
        names = [f"{attempt.group}-{attempt.index}" for attempt in attempts]
        return [
            [row.trajectory_id for row in group] async for group in runner(policy, Shop()).groups(attempts, 0, names)
        ]

    assert blocking(go()) == [["b-0", "b-1"], ["a-0", "a-1"]]


def test_groups_are_added_while_others_are_under_way_and_what_was_made_is_not_made_again(policy: Policy) -> None:
    acts, kept = runner(policy, Shop()), list[str]()

    def jobs(group: str, *prompts: str) -> list[NumberedAttempt]:
        return [
            NumberedAttempt(Attempt(task(prompt, number=0), index, group=group), f"{group}-{index}", index, index)
            for index, prompt in enumerate(prompts)
        ]

    with acts, acts.flow(lambda rows: kept.append(rows[0].trajectory_id)) as flow:
        acts.wait(flow.add(jobs("a", "slow,slow,slow", "price fig")))
        acts.wait(flow.add(jobs("b", "price fig", "price plum")))
        [first] = acts.wait(flow.groups())
        assert [row.trajectory_id for row in first] == ["b-0", "b-1"], "it does not wait for the group before it"
        ends = time.monotonic() + 20
        while len(kept) < 4 and time.monotonic() < ends:  # nobody waits for them, and episodes go on
            time.sleep(0.05)
        assert sorted(kept) == ["a-0", "a-1", "b-0", "b-1"]
        before = first[1].model_copy(update={"trajectory_id": "c-1"})
        acts.wait(flow.add(jobs("c", "price fig", "price plum"), {"c-1": [before]}))
        a, c = acts.wait(flow.groups(all_of_them=True))
        assert [row.trajectory_id for row in [*a, *c]] == ["a-0", "a-1", "c-0", "c-1"]
        assert c[1] is before
        assert "c-1" not in kept
        assert acts.wait(flow.groups()) == [], "nothing is under way"
    assert acts.engine.open_now == 0


def test_a_wait_that_is_interrupted_cancels_what_it_waited_for() -> None:
    begun, ended = threading.Event(), threading.Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they run in the background

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.5)  # until it waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    background = Background()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        background.wait(endless())
    assert ended.wait(10)
    background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "event-loop"]


def test_a_thousand_episodes_are_under_way_at_once(policy: Policy) -> None:
    acts = runner(policy, Broken(), seconds=0.05, in_flight=1000)
    rows = play(acts, *["fine"] * 1200, env="broken")
    assert len(rows) == 1200
    assert all(row.success for row in rows)
    assert acts.engine.open_most == 1000
    assert acts.engine.open_now == 0


def test_several_environments_are_dispatched_on_the_env_of_the_task(policy: Policy) -> None:
    acts = runner(policy, {"shop": Shop(), "broken": Broken()})
    attempts = [Attempt(task("price fig", "shop")), Attempt(task("fine", "broken"))]
    rows = acts.run(attempts, 0, ["r-0", "r-1"])
    assert [row.reward_components[0].name for row in rows] == ["score", "fine"]
    with pytest.raises(ValueError, match=r"task cafe-0 is of env 'cafe'; given are \['broken', 'shop'\]"):
        acts.run([Attempt(task("x", "cafe"))], 0, ["r"])


def test_cancellation_in_the_middle_of_a_batch_leaves_no_process_and_no_session(policy: Policy) -> None:
    acts = runner(policy, Shop(), tool_s=60.0, processes=3)

    async def go() -> None:
        attempts = [Attempt(task("hang", number=number)) for number in range(6)]
        rows = acts.groups(attempts, 0, [f"r-{n}" for n in range(6)])
        work = asyncio.ensure_future(anext(rows))
        while len(children()) < 3:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1

    blocking(go())
    assert not children()
    assert acts.engine.open_now == 0


def test_garbage_is_collected_as_before_once_episodes_are_over(policy: Policy) -> None:
    gc.unfreeze()  # what the collection of tests froze, which rollouts would leave
    before, seen = gc.get_threshold(), []
    acts = runner(policy, Broken())
    acts.on_progress = lambda *_: seen.append((gc.get_threshold()[0], gc.get_freeze_count()))
    play(acts, "fine", env="broken")
    assert seen[0][0] > before[0]
    assert seen[0][1] > 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    acts.engine.turn = None
    with pytest.raises(TypeError):
        play(acts, "fine", env="broken")
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_progress_says_how_fast_and_how_well(policy: Policy) -> None:
    told: list[tuple[int, int, dict[str, float | str]]] = []
    acts = runner(policy, Broken())
    acts.on_progress = lambda *numbers: told.append(numbers)
    play(acts, *["fine"] * 5, env="broken")
    done, total, shown = told[-1]
    assert (done, total, shown["success"]) == (5, 5, 1.0)
    assert list(shown) == ["success", "episodes/s", "tokens/s"], "of an endpoint's rows, no tokens are known"


def children() -> list[psutil.Process]:
    """Hosts of episodes that this process started."""
    matches = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "agentrl.environments.hosted_process" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
        except psutil.NoSuchProcess:
            continue
    return matches


class Patient(Shop):
    replayable = True
    format_retries = 1


def test_calls_that_cannot_be_read_are_answered_by_what_is_wrong_and_counted(policy: Policy) -> None:
    broken = '<tool_call>{"name": </tool_call>'
    acts = runner(policy, Patient())
    once, twice = play(acts, f"{broken},price fig,done", f"{broken},{broken},done")
    assert (once.termination, once.success) == (Termination.ANSWERED, True)
    assert (once.n_steps, once.n_tool_calls, once.n_tool_errors, once.tags) == (3, 1, 1, ["format_errors:1"])
    message = once.messages[2]
    assert (message.role, message.name) == (Role.USER, "format_error")
    assert message.content.startswith("Your calls could not be read: tool call 0: ")
    assert not any(once.action_mask[message.token_start : message.token_end]), "no policy said it"
    assert (twice.termination, twice.n_steps) == (Termination.FORMAT_ERROR, 2)
    [ended] = play(runner(policy, Patient(), format_retries=0), f"{broken},done")
    assert (ended.termination, ended.n_steps) == (Termination.FORMAT_ERROR, 1)
    [never] = play(runner(policy, Shop()), f"{broken},done")
    assert never.termination == Termination.FORMAT_ERROR

    async def made_again() -> Any:
        host = Threads()
        episode = await rebuild(protocol(Patient(), host), task(f"{broken},price fig,done"), once.messages[:-1])
        try:
            return (await episode.score()).state
        finally:
            await episode.close()
            await host.close()

    assert blocking(made_again()) == {"asked": ["fig"]}


def test_an_observation_has_a_budget_of_tokens(policy: Policy) -> None:
    [row] = play(runner(policy, Shop(), observation_tokens=80), "flood,price fig")
    flooded, short = answers(row)
    assert short == "3"
    assert 60 < policy.codec.count(flooded) <= 80
    assert flooded.startswith("xx")
    assert flooded.endswith("\n[cut here: the whole has 50000000 characters]")
    assert row.tags == ["observations_cut:1"]
