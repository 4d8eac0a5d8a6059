"""What recording costs: 64 conversations at once with an engine that answers at once, so all time is the recorder's.

The clients are a process of their own and speak plain HTTP. A turn's cost is the processor time of the recorder's
process: reading the request, finding its conversation, encoding what is new, reading the sampled tokens, the line on
the disk and the answer.

Beside it, in turns, what a server costs that does no more than any server must: by the same HTTP library, it reads the
JSON, renders and encodes the conversation, decodes the sampled tokens and answers. It parses no call and keeps nothing.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONVERSATIONS = 64
TURNS, ROUNDS = 24, 3
TARGET_MS = 2.0
SIZES = (4_000, 76_000)
"""Bytes of a request: of a small agent, and of Claude Code, which offers 24 tools."""
WORDS = "What this means, in a sentence that is as long as such sentences are, or a little longer than that. "
CLIENTS = (
    f"""
import asyncio, sys, httpx
WORDS = {WORDS!r}
"""
    + """
async def talk(client, number, turns):
    messages = [{"role": "user", "content": f"city of the boss of person {number}?"}]
    for turn in range(turns):
        body = {"model": "tiny", "messages": messages, "tools": tools(size)}
        said = (await client.post("/chat/completions", json=body)).raise_for_status().json()["choices"][0]["message"]
        messages.append(said)
        for call in said["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"the answer is {turn}"})

async def main(url, conversations, turns):
    limits = httpx.Limits(max_connections=conversations)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as client:
        await asyncio.gather(*(talk(client, number, turns) for number in range(conversations)))

def tools(size):
    field = {"type": "string", "description": WORDS}
    schema = {"type": "object", "properties": {f"field_{n}": field for n in range(8)}}
    find = {"type": "object", "properties": {"who": {"type": "string"}, "rel": {"type": "string"}}}
    functions = [{"name": "find", "description": "Look up one fact.", "parameters": find}]
    functions += [{"name": f"tool_{n}", "description": 20 * WORDS, "parameters": schema} for n in range(size // 3300)]
    return [{"type": "function", "function": function} for function in functions]

url, conversations, turns, size = sys.argv[1], *map(int, sys.argv[2:])
asyncio.run(main(url, conversations, turns))
"""
)


def overhead(turns: int, size: int = SIZES[0]) -> float:
    """Milliseconds of processor time of a turn, of ``turns`` in each conversation, whose requests have about ``size``
    bytes, most of them tools."""
    from agentrl.engines.base import Sampling
    from agentrl.recorder.episodes import Episodes
    from agentrl.recorder.recorder import Recorder
    from agentrl.recorder.sampler import Sampler
    from agentrl.recorder.server import recording

    policy, ids = _policy()

    async def serve(folder: Path) -> float:
        episodes = Episodes(folder, _Nowhere(), "tiny", policy.tokenizer_fingerprint)
        sampling = Sampling(max_tokens=1 << 20, max_turn_tokens=4 * len(ids))
        recorder = Recorder(Sampler(_AtOnce(ids), policy, sampling, 60.0, 0), "tiny", episodes)
        await recorder.start()
        cost = await _cost(recording(recorder, "127.0.0.1"), turns, size)
        await recorder.stop()
        return cost

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(serve(Path(folder)))


def least(turns: int, size: int = SIZES[0]) -> float:
    """The same of a server that does no more than any server must."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    policy, ids = _policy()
    call = {"id": "", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ann", "rel": "boss"}'}}

    async def answer(request: Request) -> Response:
        body = await request.json()
        messages = [{**heard, "content": heard["content"] or ""} for heard in body["messages"]]
        text = policy.tokenizer.apply_chat_template(
            messages, tools=body["tools"], add_generation_prompt=True, tokenize=False
        )
        policy.tokenizer.encode(text, add_special_tokens=False)
        message = {"role": "assistant", "content": policy.tokenizer.decode(ids)}
        calls = [{**call, "id": f"call_{len(messages)}"}]
        return JSONResponse({"choices": [{"message": {**message, "tool_calls": calls}}]})

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    return asyncio.run(_cost(app, turns, size))


def _policy() -> tuple[Any, list[int]]:
    """A policy, and the tokens of a turn that calls a tool."""
    from agentrl.models.tiny import tiny_policy
    from agentrl.schemas.trajectory import Message, Role, ToolCall

    call = ToolCall(id="call_0", name="find", arguments=json.dumps({"who": "Ann", "rel": "boss"}))
    message = Message(role=Role.ASSISTANT, content="I look it up.", tool_calls=[call])
    asked = [Message(role=Role.USER, content=text) for text in ("city of the boss of person 12?", 20 * WORDS)]
    policy = tiny_policy([[message, *asked]], seed=0)
    policy.name = "tiny"
    return policy, policy.codec.assistant(message)


async def _cost(app: Any, turns: int, size: int) -> float:
    """Milliseconds of processor time of a turn, of this process, while it serves ``app``."""
    from agentrl.recorder.listening import bound
    from agentrl.recorder.server import server_of, settle

    listening = bound("127.0.0.1", 0)
    server = server_of(app)
    serving = asyncio.create_task(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    used = 0.0
    for length in (2, turns):  # the first ones load modules and templates
        settle()
        start = time.process_time()
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENTS, url, str(CONVERSATIONS), str(length), str(size)
        )
        if await clients.wait():
            raise subprocess.CalledProcessError(clients.returncode or 1, "the clients of the recorder")
        used = time.process_time() - start
    server.should_exit = True
    await serving
    return 1000 * used / (turns * CONVERSATIONS)


class _AtOnce:
    """An engine that says the same at once."""

    exact, reproducible, version = True, False, 0

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Any:
        from agentrl.engines.base import Session

        return Session(key=key, root=root)

    async def turn(self, session: Any, sampling: Any, **_: Any) -> Any:
        from agentrl.engines.base import Turn
        from agentrl.schemas.trajectory import Span

        spans = [Span(version=0, start=0, end=len(self.ids))]
        return Turn(list(self.ids), [-0.5] * len(self.ids), spans, "stop")


class _Nowhere:
    """A store that forgets."""

    def stored(self, recording: str) -> set[str]:
        return set()

    def keep(self, recording: str, rows: Any) -> None:
        pass


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    for bytes_of_request in SIZES:
        pairs = [(overhead(TURNS, bytes_of_request), least(TURNS, bytes_of_request)) for _ in range(ROUNDS)]
        cost, least_cost = (statistics.median(costs) for costs in zip(*pairs, strict=True))
        met = "met" if cost < TARGET_MS else "MISSED"
        what = f"recorder, a turn at {CONVERSATIONS} conversations, requests of {bytes_of_request // 1000} kB"
        print(f"{what:<72} {cost:.2f} ms   below {TARGET_MS:.0f} ms   {met}")
        print(
            f"{'  a server that records nothing':<72} {least_cost:.2f} ms   {least_cost / cost:.2f} times", flush=True
        )
