"""Layer-wise expansion of questions (the agentic expander of WebShaper: Tao et al. 2025, arXiv 2507.15061): a name in a
question gives way to a sub-question that somebody proposes, and whose answer the tools give."""

import json
from collections.abc import Generator
from random import Random
from typing import TYPE_CHECKING, Any

from agentrl.environments.scripted import Turns, advised, play
from agentrl.environments.search_qa import questions
from agentrl.environments.search_qa.expert import query_for
from agentrl.environments.search_qa.graph import RELATIONS, Graph
from agentrl.schemas.json_text import loads
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

if TYPE_CHECKING:
    from agentrl.environments.search_qa.environment import SearchQA

FORM = (
    'JSON alone, {"replace": NAME, "by": X}: a name of the question, and what stands for it alone. X is ["is", NAME], '
    '["of", RELATION, "ahead", X] (the object of a relation), ["of", RELATION, "back", X] (its subject), '
    f'["and", X, X] or ["or", X, X]; relations are {", ".join(RELATIONS)}'
)
"""What a proposal looks like."""

TRIES = 20


async def expanded(family: "SearchQA", text: str, like: Task) -> Task | None:
    """The task with a proposal in place of a name; None if the proposal has another form, no projection, or names
    nothing in the question; if an expert who searches and reads does not find that the sub-question's answer is the
    name; or if the whole then has another answer, a shortcut, a redundant part or one that goes in a circle, or is too
    long."""
    graph, whole = family.world_of(like).graph, json.loads(like.metadata)["question"]
    name, part = _read(text)
    if not questions.is_expression(graph, part) or part[0] == "is" or name not in questions.constants(whole):
        return None
    if questions.denotation(graph, part) != {name} or not await _found(family, part, name, like):
        return None
    longer = questions.replaced(whole, name, part)
    answers = json.loads(like.ground_truth).split("; ")
    return family.about(like, longer, answers) if _is_new(graph, longer) else None


def _is_new(graph: Graph, longer: questions.Expression) -> bool:
    """Whether a longer question is sound, and no part of it stands for what it names: such a part goes in a circle."""
    circles = (questions.denotation(graph, part) & {*questions.constants(part)} for part in questions.parts(longer))
    return questions.sound(graph, longer) and not any(circles)


def _read(text: str) -> tuple[str, questions.Expression]:
    """The name and what stands for it; an empty name if it is no proposal."""
    try:
        proposal = loads(text)
    except ValueError:
        return "", []
    if not isinstance(proposal, dict) or set(proposal) != {"replace", "by"}:
        return "", []
    return str(proposal["replace"]), proposal["by"]


async def _found(family: "SearchQA", part: questions.Expression, name: str, like: Task) -> bool:
    """Whether an episode of the sub-question ends with the name as its answer."""
    task = family.about(like, part, [name])
    if task is None:
        return False
    episode: Any = await family.reset(task)
    episode.unknown = ()
    try:
        await play(episode, advised(episode, 0.0, Random(task.task_id)), family.max_steps)
        return (await episode.score()).success
    finally:
        await episode.close()


def demonstrated(family: "SearchQA", task: Task, noise: float, random: Random) -> Turns:
    """An expander that reads what is said of a name, or searches and reads the thing that says it, and proposes one
    projection. It errs with probability ``noise`` by proposing a projection at random."""
    graph, whole = family.world_of(task).graph, json.loads(task.metadata)["question"]
    name = questions.constants(whole)[0]
    part: questions.Expression = ["is", name]
    for _ in range(TRIES):
        longer = questions.expanded(graph, whole, random)
        if longer and _is_new(graph, longer) and family.about(task, longer, json.loads(task.ground_truth).split("; ")):
            name, part = next(pair for pair in _layer(whole, longer) if pair[1][0] != "is")
            break
    other = questions.constants(part)[0]
    if part[0] == "of" and part[2] == "ahead":
        yield _call(0, "search", query=query_for(graph, name))
        yield _call(1, "read", title=other)
    else:
        yield _call(0, "read", title=name)
    if random.random() < noise:
        relation, direction = random.choice([*RELATIONS]), random.choice(["ahead", "back"])
        part = ["of", relation, direction, ["is", random.choice(graph.names)]]
    yield Message(role=Role.ASSISTANT, content=json.dumps({"replace": name, "by": part}))


def _layer(before: questions.Expression, after: questions.Expression) -> Generator[tuple[str, questions.Expression]]:
    """The names of a question, each with what stands in its place in another one of the same form."""
    if before[0] == "is":
        yield before[1], after
        return
    for part, other in zip(before[1:], after[1:], strict=True):
        if isinstance(part, list):
            yield from _layer(part, other)


def _call(number: int, tool: str, **arguments: str) -> Message:
    call = ToolCall(id=f"call_{number}", name=tool, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(role=Role.ASSISTANT, tool_calls=[call])
