"""The agent of this project: it answers questions about people with one tool. It speaks OpenAI's API, and knows nothing
of agentrl. Behind `agentrl serve` it opens an episode for each question, and posts afterwards whether the answer was
right.

    python agent.py cases.jsonl http://127.0.0.1:8321
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Look up one fact. Chain calls to follow relations, then reply with the answer alone.",
        "parameters": {
            "type": "object",
            "properties": {"who": {"type": "string"}, "rel": {"type": "string"}},
            "required": ["who", "rel"],
        },
    },
}


def find(facts: dict[str, dict[str, str]], who: str = "", rel: str = "", **_: object) -> str:
    return facts.get(who, {}).get(rel, "unknown")


async def answer(client: AsyncOpenAI, model: str, case: dict[str, Any]) -> str:
    """What the agent says at the end."""
    messages: list[Any] = [{"role": "user", "content": case["question"]}]
    for _ in range(5):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])  # type: ignore[list-item]
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                text = find(case["facts"], **json.loads(call.function.arguments))
            except (ValueError, TypeError):
                text = "find takes who and rel"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return ""


async def recorded(server: httpx.AsyncClient, case: dict[str, Any]) -> bool:
    about = {"task_id": case["id"], "env": "lookup", "prompt": case["question"]}
    episode = (await server.post("/episodes", json=about)).raise_for_status().json()
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
        right = (await answer(client, episode["model"], case)).strip() == case["answer"]
    headers = {"authorization": f"Bearer {episode['api_key']}"}
    reward = await server.post(f"/episodes/{episode['id']}/reward", json={"reward": float(right)}, headers=headers)
    reward.raise_for_status()
    return right


async def main(cases: list[dict[str, Any]], url: str) -> None:
    # a connection for each request: one that was kept may be closed by the server as the next request is on its way
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as server:
        at_once = asyncio.Semaphore(16)

        async def one(case: dict[str, Any]) -> bool:
            async with at_once:
                return await recorded(server, case)

        right = sum(await asyncio.gather(*map(one, cases)))
    print(f"{right} of {len(cases)} right")


if __name__ == "__main__":
    asyncio.run(main([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()], sys.argv[2]))
