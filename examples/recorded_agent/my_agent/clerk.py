"""An agent written with pydantic-ai. Only the last class knows agentrl: it lets a policy be the agent's model."""

import json

from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentrl.environments.agent import AgentEnvironment, Endpoint
from agentrl.environments.lookup import LookupEnvironment
from agentrl.schemas.task import Task


async def answer(question: str, facts: dict[str, dict[str, str]], base_url: str, api_key: str, model: str) -> str:
    """The agent: answers a question about people with a tool that looks one fact up."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    clerk = Agent(OpenAIChatModel(model, provider=provider), retries=1)

    @clerk.tool_plain
    def find(who: str, rel: str) -> str:
        """Look up one fact."""
        return facts.get(who, {}).get(rel, "unknown")

    return (await clerk.run(question)).output


class Clerk(AgentEnvironment):
    """Questions such as "city of the boss of Ann?"."""

    name = "clerk"
    version = "1"
    max_steps = 6

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return LookupEnvironment().tasks(sizes, seed)

    async def run(self, task: Task, endpoint: Endpoint) -> float:
        """The reward: 1 for the right answer."""
        facts = json.loads(task.metadata)["facts"]
        try:
            result = await answer(task.prompt, facts, endpoint.base_url, endpoint.api_key, endpoint.model)
        except AgentRunError:  # what the policy said made the agent give up
            return 0.0
        return float(result.strip() == json.loads(task.ground_truth))
