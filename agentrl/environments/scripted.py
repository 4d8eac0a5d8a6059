"""Scripted policies, and the loop that plays one: the expert, which follows what an episode advises, and a random
policy, which calls tools with arguments that fit their types. A task that the random policy solves is too easy."""

import json
import re
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any, Protocol, cast

from agentrl.environments.base import Advised, Demonstrator, Environment, Episode
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall

ANSWERS = 0.2
"""How often it answers in place of a call."""


Turns = Generator[Message, list[Message], None]
"""Assistant messages; the messages that answer each are sent back into the generator."""


class NoExpertError(ValueError):
    """A demonstration is asked of an environment without an expert."""


@dataclass
class Played:
    """What was said after the opening, the numbers in the ``info`` of its steps, and why the episode ended. ``seconds``
    are those of the calls that the messages of these numbers answer."""

    messages: list[Message] = field(default_factory=list)
    info: Counter[str] = field(default_factory=Counter)
    termination: Termination = Termination.MAX_STEPS
    seconds: dict[int, float] = field(default_factory=dict)


async def play(episode: Episode, turns: Turns, max_steps: int) -> Played:
    """Let a scripted policy act, for at most ``max_steps`` messages; the last of them can only be an answer."""
    played = Played()
    message = next(turns)
    for left in range(max_steps - 1, -1, -1):
        if not left and message.tool_calls:
            played.messages.append(message)
            break
        began = monotonic()
        step = (await episode.step(message)).timed(monotonic() - began)
        played.seconds |= step.known(len(played.messages) + 1)
        played.messages += [message.model_copy(update={"reward": step.reward}), *step.messages]
        played.info.update({name: value for name, value in step.info.items() if isinstance(value, int)})
        if step.done or not step.messages:
            played.termination = Termination.ANSWERED
            break
        if left:
            message = turns.send(step.messages)
    return played


def expert(environment: Environment, episode: Episode, task: Task, noise: float, random: Random) -> Turns:
    """The turns of the scripted expert, which errs with probability ``noise`` at each: what the environment
    demonstrates, or if it does not, what the episode advises.

    Raises NoExpertError if there is neither.
    """
    if hasattr(environment, "demonstrate"):
        return cast(Demonstrator, environment).demonstrate(task, noise, random)
    if hasattr(episode, "advise"):
        return advised(cast(Advised, episode), noise, random)
    raise NoExpertError(
        f"env {environment.name!r} has no scripted expert; give it demonstrate(), or its episodes advise() and "
        "stray(), or import trajectories"
    )


def adviser(environment: Environment, episode: Episode) -> Advised:
    """An episode as its own adviser. Raises NoExpertError if it advises nothing."""
    if not hasattr(episode, "advise"):
        raise NoExpertError(
            f"env {environment.name!r} has no adviser: its episodes need advise(), which says what an expert would do "
            "from any state"
        )
    return cast(Advised, episode)


def advised(episode: Advised, noise: float, random: Random) -> Turns:
    """The turns that an episode advises, each replaced by a turn at random with probability ``noise``."""
    while True:
        yield episode.stray(random) if random.random() < noise else episode.advise()


def at_random(episode: Episode, random: Random) -> Turns:
    """Turns without sense, whose texts are words that were seen."""
    seen = ""
    while True:
        answers = yield random_turn(episode, random, seen)
        seen += " ".join(message.content for message in answers) + " "


class Offer(Protocol):
    """What a random turn sees of an episode."""

    opening: list[Message]
    tools: str


def random_turn(episode: Offer, random: Random, seen: str = "") -> Message:
    """A call of a tool, or an answer. Texts are words of the opening and of ``seen``."""
    words = _words(episode, seen)
    tools = json.loads(episode.tools)
    if not tools or random.random() < ANSWERS:
        return Message(role=Role.ASSISTANT, content=random.choice(words))
    return _calling(tools, words, random)


def random_call(episode: Offer, random: Random, seen: str = "") -> Message | None:
    """A call of a tool, with arguments as those of :func:`random_turn`; None if there are no tools."""
    tools = json.loads(episode.tools)
    return _calling(tools, _words(episode, seen), random) if tools else None


def _words(episode: Offer, seen: str) -> list[str]:
    texts = [*(message.content for message in episode.opening), seen]
    return re.findall(r"[\w@.-]+", " ".join(texts)) or ["yes"]


def _calling(tools: list[Any], words: list[str], random: Random) -> Message:
    function = random.choice(tools)["function"]
    parameters = function["parameters"]
    required = parameters.get("required", [])
    given = {
        name: _value(schema, parameters.get("$defs", {}), words, random)
        for name, schema in parameters.get("properties", {}).items()
        if name in required or random.random() < 0.5
    }
    call = ToolCall(id="call_0", name=function["name"], arguments=json.dumps(given, ensure_ascii=False))
    return Message(role=Role.ASSISTANT, tool_calls=[call])


def _value(schema: Mapping[str, Any], known: Mapping[str, Any], words: list[str], random: Random) -> Any:
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if options := schema.get("enum") or schema.get("anyOf"):
        chosen = random.choice(options)
        return _value(chosen, known, words, random) if "anyOf" in schema else chosen
    kind = schema.get("type")
    if kind == "object":
        return {
            name: _value(property_schema, known, words, random)
            for name, property_schema in schema.get("properties", {}).items()
        }
    if kind == "array":
        return [_value(schema.get("items", {}), known, words, random) for _ in range(random.randint(0, 3))]
    numbers = [int(number) for word in words for number in re.findall(r"[0-9]+", word)[:1]] or [1]
    simple = {"boolean": random.random() < 0.5, "integer": random.choice(numbers), "null": None}
    if kind == "number":
        return float(random.choice(numbers))
    return simple[kind] if kind in simple else random.choice(words)
