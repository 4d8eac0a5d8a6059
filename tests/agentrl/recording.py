"""A recorder behind a real socket, in front of an engine that says what a test wants."""

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import OpenAI

from agentrl.engines.base import EngineError, Sampling, Session, Turn
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.recorder.episodes import Episodes
from agentrl.recorder.listening import bound
from agentrl.recorder.recorder import Recorder, RecorderSettings
from agentrl.recorder.sampler import Sampler
from agentrl.recorder.server import recording, server_of
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Role, Span, ToolCall, Trajectory

TEXT = "The city of Ann is Rome. What is the weather? Sunny, and 20 degrees. <think>I look it up</think> hello again"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

Says = Callable[[str], Message | str]


def policy_for_tests() -> Policy:
    policy = tiny_policy([[Message(role=Role.USER, content=TEXT)]], seed=0)
    policy.name = "tiny"
    return policy


@dataclass
class ScriptedTokens:
    """Samples the tokens of what ``says`` answers to the text of the session so far."""

    policy: Policy
    says: Says
    delay: float = 0.0
    exact = True
    reproducible = False
    version = 0
    fails: list[EngineError] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)
    under_way: int = 0
    cancelled: int = 0
    computed: int = 0
    """Tokens that the engine had to read anew."""

    def __post_init__(self) -> None:
        self._left: dict[Session, tuple[int, list[int]]] = {}
        self._known: dict[Session, int] = {}
        self.open_sessions = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        self.open_sessions += 1
        return Session(key=key, root=root, on_end=self._end)

    def _end(self, session: Session) -> None:
        self.open_sessions -= 1
        self._left.pop(session, None)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **_: Any) -> Turn:
        if self.fails:
            raise self.fails.pop()
        self.asked.append(sampling)
        self.computed += len(session.ids) - self._known.get(session, 0)
        self.under_way += 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        length, left = self._left.pop(session, (0, []))
        if length != len(session.ids):  # another turn, after one that was not sampled to its end
            text = self.says(str(self.policy.tokenizer.decode(session.ids)))
            message = Message(role=Role.ASSISTANT, content=text) if isinstance(text, str) else text
            left = self.policy.codec.assistant(message)
        ids, rest = left[: sampling.max_turn_tokens], left[sampling.max_turn_tokens :]
        self._known[session] = len(session.ids) + len(ids)
        if rest:
            self._left[session] = (self._known[session], rest)
        ended = not rest and ids[-1] in stop
        spans = [Span(version=self.version, start=0, end=len(ids))]
        return Turn(ids, [-0.5] * len(ids), spans, "stop" if ended else "length")

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        return [-0.5] * (len(ids) - start)

    async def load(self, weights: Any) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@dataclass
class RowsInMemory:
    """``fails`` are raised by the next appends. ``refuses`` gives what an append of a row raises."""

    rows: dict[str, list[Trajectory]] = field(default_factory=dict)
    fails: list[Exception] = field(default_factory=list)
    refuses: Callable[[Trajectory], Exception | None] = lambda _: None
    annotations: dict[str, Annotation] = field(default_factory=dict)

    def stored(self, recording: str) -> set[str]:
        return {row.trajectory_id for row in self.rows.get(recording, [])}

    def keep(self, recording: str, rows: list[Trajectory]) -> None:
        if self.fails:
            raise self.fails.pop()
        for row in rows:
            if (error := self.refuses(row)) is not None:
                raise error
        self.rows.setdefault(recording, []).extend(rows)

    def annotate(self, annotations: list[Annotation]) -> None:
        self.annotations.update({each.annotation_id: each for each in annotations})

    def all(self) -> list[Trajectory]:
        return [row for rows in self.rows.values() for row in rows]


class Served:
    """The recorder and its event loop, in a thread. ``killed`` ends it as ``kill -9`` would: nothing is stored."""

    def __init__(self, recorder: Recorder, host: str = "127.0.0.1") -> None:
        self.recorder = recorder
        self.engine: Any = recorder.sampler.engine
        self.store: Any = recorder.episodes.store
        self.killed = False
        self.said: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(host)), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self, host: str) -> None:
        self._loop = asyncio.get_running_loop()
        listening = bound(host, 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = server_of(recording(self.recorder, host))
        self.said = await self.recorder.start()
        self._ready.set()
        await self._server.serve([listening])
        if self.killed:
            for lock in self.recorder.episodes._locks:
                lock.release()
        else:
            await self.recorder.stop()

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def made() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result(20)

    def flush(self) -> list[Trajectory]:
        """All rows, after what is closed was stored."""
        self.on_loop(self.recorder.episodes.flush)
        return self.store.all()

    def hold(self) -> None:
        """Store nothing before :meth:`let_go`, so that what is closed meanwhile is appended together."""
        self.on_loop(self.recorder.episodes._flushing.acquire)

    def let_go(self) -> None:
        async def go() -> None:
            self.recorder.episodes._flushing.release()
            await self.recorder.episodes.flush()

        self.on_loop(go)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    def client(self, key: str = "none", path: str = "/v1", **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url + path, api_key=key, max_retries=options.pop("max_retries", 0), **options)


@contextmanager
def served(
    folder: Path, policy: Policy, says: Says, store: RowsInMemory | None = None, **settings: Any
) -> Iterator[Served]:
    host, delay = settings.pop("host", "127.0.0.1"), settings.pop("delay", 0.0)
    engine = settings.pop("engine", ScriptedTokens)(policy, says, delay)
    limits = {"max_tokens": settings.pop("room", 4000), "max_turn_tokens": settings.pop("turn_tokens", 200)}
    sampler = Sampler(engine, policy, Sampling(**limits), 60.0, 0)
    episodes = Episodes(folder, store or RowsInMemory(), policy.name, policy.tokenizer_fingerprint)
    server = Served(Recorder(sampler, policy.name, episodes, RecorderSettings(**settings)), host)
    try:
        yield server
    finally:
        server.end()


def calls(city: str, reasoning: str | None = None) -> Message:
    call = ToolCall(id="call_0", name="weather", arguments=json.dumps({"city": city, "when": "now"}))
    return Message(role=Role.ASSISTANT, reasoning=reasoning, tool_calls=[call])


def agent(text: str) -> Message | str:
    """Looks the weather up, and answers."""
    return (
        "Sunny." if text.rstrip().endswith("</tool_response><|im_end|>\n<|im_start|>assistant") else calls("Rome", "hm")
    )


def sampled(policy: Policy, row: Trajectory) -> list[str]:
    """The text of each run of sampled tokens."""
    ids = zip(row.input_ids, row.action_mask, strict=True)
    return [
        policy.tokenizer.decode([token for token, _ in run])
        for own, run in itertools.groupby(ids, key=lambda value: value[1])
        if own
    ]


def check(policy: Policy, row: Trajectory) -> None:
    """What every row keeps to."""
    table = to_table([row], TRAJECTORY_SCHEMA)
    assert table.num_rows == 1
    assert len(row.input_ids) == len(row.action_mask) == len(row.logprobs) == row.n_tokens
    assert all(math.isnan(logprob) != own for logprob, own in zip(row.logprobs, row.action_mask, strict=True))
    assert row.messages[-1].token_end == row.n_tokens
    for message in row.messages:
        assert message.token_start is not None
        if message.role is Role.ASSISTANT and all(row.action_mask[message.token_start : message.token_end]):
            read = policy.codec.parse(row.input_ids[message.token_start : message.token_end]).message
            assert (read.content, read.tool_calls) == (message.content, message.tool_calls)


def chat(client: openai.OpenAI, *text: str, system: str | None = None) -> str:
    """The answer to a conversation whose turns alternate."""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": entry} for n, entry in enumerate(text)]
    return client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content or ""


def numbered() -> Callable[[str], str]:
    numbers = itertools.count()
    return lambda _: f"answer {next(numbers)}"


def open_episode(server: Served, **about: Any) -> tuple[openai.OpenAI, str]:
    opened = httpx.post(f"{server.url}/episodes", json=about).json()
    return openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0), opened["id"]


def rewarded(server: Served, client: openai.OpenAI, name: str, reward: float = 1.0) -> list[Trajectory]:
    answer = httpx.post(
        f"{server.url}/episodes/{name}/reward",
        json={"reward": reward},
        headers={"authorization": f"Bearer {client.api_key}"},
    )
    assert answer.status_code == 200, answer.text
    rows = server.flush()
    return [row for row in rows if row.episode_id == name]
