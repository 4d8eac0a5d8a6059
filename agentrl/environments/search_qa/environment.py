"""The environment ``search_qa``: "Name the city where the person who wrote X was born." Its level is its hops.

The policy searches (BM25) and reads passages, and answers with a name, or with two if it is asked to name each. All
tasks of one config share one world, which ``world`` and ``size`` make, or some ``worlds`` with the same names and other
facts, so that a policy has to read; held-out questions are other questions about them.
"""

import json
from collections.abc import Generator, Iterator
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from agentrl.environments.base import Observation, Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.search_qa import questions
from agentrl.environments.search_qa.expand import FORM, demonstrated, expanded
from agentrl.environments.search_qa.expert import SHOWN, Missing, Seen, answers, answers_within
from agentrl.environments.search_qa.graph import TERMS, SearchWorld, graph
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import ToolError, tool
from agentrl.rewards.answers import exact_match, f1
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall, Trajectory

LONGEST_WAY = 12
"""Passages and searches of the expert, at most. An episode has room for mistakes beside."""


class SearchConfig(FamilyConfig):
    size: int = Field(400, ge=60, le=5000, description="people of the world; other things grow with them")
    world: int = Field(0, ge=0, description="another number is another world")
    worlds: int = Field(
        1,
        ge=1,
        le=100,
        description="worlds with the same names and other facts; each question says which of them it is about",
    )
    reward: Literal["exact", "f1"] = Field("exact", description="what the reward is; the other is recorded beside it")
    unknown: int = Field(
        0,
        ge=0,
        le=len(TERMS),
        description=f"relations, of {len(TERMS)}, that questions call by terms of their own, each of which the "
        "scripted expert takes for one of these at random",
    )


class SearchEpisode(ToolEpisode["SearchQA"]):
    """One attempt at a question. ``needed`` are passages that show the answer. ``pages`` and ``passages`` were shown in
    whole, which an expert goes by; ``named`` are the names that stood there. ``whole`` is the last answer of a tool,
    ``unknown`` what the expert does not understand."""

    def __init__(self, family: "SearchQA", task: Task) -> None:
        super().__init__(family, task)
        metadata = json.loads(task.metadata)
        self.question: questions.Expression = metadata["question"]
        self.world_number: int = metadata.get("world", 0)
        self.unknown = family.unknown
        self.answers: list[str] = json.loads(task.ground_truth).split("; ")
        self.needed = questions.needed(self.world.graph, self.question, self.answers)
        self.named = set(questions.constants(self.question))
        self.pages: set[tuple[str, int]] = set()
        self.passages: set[str] = set()
        self.whole = ""
        self.read_at: dict[str, int] = {}

    @property
    def world(self) -> SearchWorld:
        """That of the question; no part of the state, which snapshots copy."""
        return self.family.world(self.world_number)

    @tool
    def search(self, query: str, page: Annotated[int, Field(ge=1)] = 1) -> str:
        """Search all passages for words. Returns titles, five a page.

        query: words to look for
        page: of the results
        """
        titles = self.world.ranked(query)
        shown = titles[(page - 1) * SHOWN : page * SHOWN]
        self.named.update(shown)
        if not shown:
            return f"no results on page {page} of {len(titles)} results" if titles else "no results"
        first = (page - 1) * SHOWN + 1
        self.whole = f"{', '.join(shown)} ({first}-{first + len(shown) - 1} of {len(titles)})"
        return self.whole

    @tool
    def read(self, title: str) -> str:
        """Read a passage. Reply without a call to answer: a name alone, or names with ; between them.

        title: of the passage, as search shows it
        """
        passage = self.world.graph.passages.get(title)
        if passage is None:
            raise ToolError(f"there is no passage {title!r}; search for it")
        if title not in self.read_at:
            self.read_at[title] = self.calls - 1
            if title in self.needed:
                self.earn(1 / len(self.needed))
        self.named.update(self.world.graph.near(title))
        self.whole = passage
        return passage

    def observed(self, call: ToolCall, seen: Observation) -> None:
        """What was cut on its way is not known; one can ask again."""
        if seen.error or seen.content != self.whole:
            return
        given = call.parsed()
        if call.name == "read":
            self.passages.add(given["title"])
        else:
            self.pages.add((given["query"], given.get("page", 1)))

    def outcome(self) -> Score:
        names = [] if self.answer is None else sorted({name.strip() for name in self.answer.split(";")})
        exact = len(names) == len(self.answers) and all(map(exact_match, names, sorted(self.answers)))
        overlap = f1(" ".join(names), " ".join(self.answers))
        by = self.family.config.reward
        components = (
            RewardComponent(name="exact_match", value=float(exact), weight=float(by == "exact")),
            RewardComponent(name="f1", value=overlap, weight=float(by == "f1")),
        )
        state = {"answer": self.answer, "subgoals": [self.read_at.get(title) for title in self.needed]}
        return Score(exact, components, state)

    def advise(self) -> Message:
        """The next passage to read or search to make, or the answer, by what was seen so far."""
        seen = Seen(self.world.graph, self.world.ranked, self.passages, self.pages)
        question = questions.understood(self.question, self.unknown, Random(self.task.task_id))
        try:
            return self.saying("; ".join(answers(question, seen)))
        except Missing as missing:
            return self.calling(missing.tool, **missing.arguments)

    def stray(self, random: Random) -> Message:
        if random.random() < 0.2:
            return self.saying(random.choice(sorted(self.named)))
        return self.calling("read", title=random.choice(sorted(self.named)))


class SearchQA(Family):
    """The environment; see the module's docstring."""

    name = "search_qa"
    version = "2"
    max_steps = 20
    verifier = "exact_match"
    levels = {1: 0.08, 2: 0.2, 3: 0.26, 4: 0.24, 5: 0.22}  # noqa: RUF012
    episode = SearchEpisode
    config: SearchConfig
    proposal = FORM

    def __init__(self, config: SearchConfig = SearchConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)
        self.unknown = list(TERMS)[: config.unknown]
        """Relations whose terms the expert does not know."""
        self.worlds: dict[int, SearchWorld] = {}

    def world(self, number: int) -> SearchWorld:
        """One of the worlds, which is made when something is asked of it."""
        if number not in self.worlds:
            self.worlds[number] = SearchWorld(number, graph(self.config.size, self.config.world, number))
        return self.worlds[number]

    def world_of(self, task: Task) -> SearchWorld:
        """The world that a question is about."""
        return self.world(json.loads(task.metadata).get("world", 0))

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        while True:
            number = random.randrange(self.config.worlds) if self.config.worlds > 1 else 0
            world = self.world(number)
            question = questions.compose(world.graph, level, random)
            draft = self._draft(world, *question) if question else None
            if draft:
                yield draft

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """Tasks that the answer of a row solves: parts of the question that stand for it alone."""
        last = row.messages[-1]
        if last.role is not Role.ASSISTANT or last.tool_calls:
            return []
        answers = {name.strip() for name in last.content.split(";")}
        whole = json.loads(task.metadata)["question"]
        graph = self.world_of(task).graph
        inside = [part for part in questions.parts(whole)[1:] if questions.denotation(graph, part) == answers]
        return [new for part in inside if (new := self.about(task, part, sorted(answers)))]

    def vary(self, task: Task, random: Random) -> Task | None:
        """The same answer, one hop further: a name in the question gives way to a description that fits it alone. None
        if there is no such description."""
        graph, whole = self.world_of(task).graph, json.loads(task.metadata)["question"]
        for _ in range(20):
            longer = questions.expanded(graph, whole, random)
            if longer and (made := self.about(task, longer, json.loads(task.ground_truth).split("; "))):
                return made
        return None

    async def proposed(self, text: str, like: Task, random: Random) -> Task | None:
        """The task with a layer more, which somebody proposed (:mod:`agentrl.environments.search_qa.expand`)."""
        return await expanded(self, text, like)

    def demonstrate_proposal(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """How a layer is proposed, by the tools."""
        return demonstrated(self, task, noise, random)

    def about(self, task: Task, question: questions.Expression, answers: list[str]) -> Task | None:
        """Another question in place of that of a task, of its split; None if the expert has too long a way to it."""
        draft = self._draft(self.world_of(task), question, answers)
        return self.derived(task, draft, questions.hops(question)) if draft else None

    def _draft(self, world: SearchWorld, question: questions.Expression, answers: list[str]) -> Draft | None:
        """The task in a world, or None if the expert has too long a way to it."""
        if not answers_within(question, world.graph, world.ranked, LONGEST_WAY):
            return None
        text = questions.text(world.graph, question, self.unknown)
        if self.config.worlds == 1:
            return Draft(text, "; ".join(answers), {"question": question})
        return Draft(f"World {world.number}. {text}", "; ".join(answers), {"question": question, "world": world.number})
