"""``lookup``: questions such as "city of the boss of Ann?", answered by walking a small knowledge base with a tool.

Each task has a knowledge base of its own, drawn at random and never shown, so nothing can be memorised. The policy must
read the question, call ``find`` once for each relation with the entity that the last call returned, and repeat the last
result as its answer. The level is the number of calls, 1 to 3.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.base import Observation, Score, Step, answer_calls
from agentrl.environments.task_splits import digest
from agentrl.rewards.answers import exact_match
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall, Trajectory

# fmt: off
NAMES = [
    "Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned",
    "Ola", "Pam", "Ray", "Sue", "Tom", "Una", "Vic", "Wes", "Yan", "Zoe", "Abe", "Bea", "Cal", "Dot",
    "Eli", "Flo", "Gil", "Hue", "Ira", "Joy", "Kay", "Lou", "Max", "Nan", "Pat", "Rex",
]
# fmt: on
MOST_NAMES = 2000
FIRST, LAST = "BCDFGHJKLMNPQRSTVWXYZ", "bcdfghklmnprstvwxz"
LINKS = ["boss", "friend", "mentor", "rival", "cousin"]
VALUES = {
    "city": ["Rome", "Oslo", "Lima", "Kyiv", "Bonn", "Cork", "Pune", "Riga"],
    "job": ["cook", "vet", "judge", "pilot", "nurse", "baker", "monk", "tutor"],
    "pet": ["cat", "dog", "owl", "pig", "hen", "goat", "frog", "swan"],
    "dish": ["soup", "rice", "pie", "stew", "taco", "kale", "tofu", "naan"],
    "car": ["van", "jeep", "limo", "bus", "sedan", "truck", "kart", "coupe"],
}
LEVEL_SHARES = {1: 0.1, 2: 0.4, 3: 0.5}
DRAWS = 100
"""How often facts are drawn for a question that somebody wrote, until no entity comes twice on its path."""
PEOPLE_PER_TASK = 5
RESERVED = 0.2
"""Share of the chains of relations that the split ``compositional`` keeps for itself."""


@cache
def names_of(count: int) -> Sequence[str]:
    """So many first names: those above, and then others of three letters."""
    others = (first + vowel + last for last, vowel, first in product(LAST, "aeiouy", FIRST))
    known = set(NAMES) | {option.capitalize() for options in VALUES.values() for option in options}
    return [*NAMES, *(name for name in others if name not in known)][:count]


Question = tuple[str, list[str]]
"""The first name, and the relations in the order of the calls."""


def _walk(facts: dict[str, dict[str, str]], start: str, relations: list[str]) -> list[str]:
    path = [start]
    for relation in relations:
        path.append(facts[path[-1]][relation])
    return path


def _asked(row: Trajectory, facts: dict[str, dict[str, str]]) -> list[tuple[str, str, str]]:
    """Who, relation and value of each call of a row that found something, in the order of the calls."""
    triples = []
    for call in (call for message in row.messages for call in message.tool_calls):
        arguments = call.parsed()
        if call.name == "find" and isinstance(arguments, dict) and set(arguments) == {"who", "rel"}:
            who, relation = str(arguments["who"]), str(arguments["rel"])
            if (value := facts.get(who, {}).get(relation)) is not None:
                triples.append((who, relation, value))
    return triples


class LookupEpisode:
    """One attempt at walking a knowledge base, which calls only read. Each relation of the question is a subgoal."""

    def __init__(self, task: Task) -> None:
        self.task = task
        metadata = json.loads(task.metadata)
        self.facts: dict[str, dict[str, str]] = metadata["facts"]
        self.relations: list[str] = metadata["relations"]
        self.path = _walk(self.facts, metadata["start"], self.relations)
        self.reached: list[int] = []
        self.calls = 0
        self.answer: str | None = None
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = task.tools

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            return answer_calls(self.call, message)
        self.answer = message.content
        return Step(done=True)

    def call(self, call: ToolCall) -> Observation:
        number, self.calls = self.calls, self.calls + 1
        arguments = call.parsed()
        if call.name != "find":
            return Observation(f"no tool {call.name}", error=True)
        if not isinstance(arguments, dict) or set(arguments) != {"who", "rel"}:
            return Observation("find takes who and rel", error=True)
        who, rel = str(arguments["who"]), str(arguments["rel"])
        value = self.facts.get(who, {}).get(rel)
        done = len(self.reached)
        if done < len(self.relations) and (who, rel) == (self.path[done], self.relations[done]):
            self.reached.append(number)
        return Observation("unknown", error=True) if value is None else Observation(value)

    async def score(self) -> Score:
        success = self.answer is not None and exact_match(self.answer, json.loads(self.task.ground_truth))
        missing = len(self.relations) - len(self.reached)
        state = {"answer": self.answer, "subgoals": [*self.reached, *[None] * missing]}
        return Score(success, (RewardComponent(name="exact_match", value=float(success)),), state)

    async def close(self) -> None:
        pass


class LookupEnvironment:
    """The environment; see the module's docstring."""

    name = "lookup"
    version = "1"
    max_steps = 5
    compositional = True
    replayable = True
    level_shares: Mapping[int, float] = LEVEL_SHARES
    words: Mapping[str, str] = {relation: relation for relation in (*LINKS, *VALUES)}
    """Relation -> its word in questions."""
    tools: list[dict[str, Any]] = [  # noqa: RUF012  (a constant of the protocol)
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Look up one fact. Chain calls to follow relations, then reply with the answer alone.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "who": {"type": "string", "description": "a person's name"},
                        "rel": {"type": "string", "description": f"one of {', '.join([*LINKS, *VALUES])}"},
                    },
                    "required": ["who", "rel"],
                },
            },
        }
    ]

    def __init__(
        self,
        names: Annotated[
            int, Field(ge=PEOPLE_PER_TASK, le=MOST_NAMES, description="first names; 155 questions start with each")
        ] = len(NAMES),
        levels: Annotated[
            list[int] | None, Field(min_length=1, description="levels of the tasks that are drawn; None: all")
        ] = None,
    ) -> None:
        shares = self.level_shares
        if unknown := set(levels or ()) - set(shares):
            raise ValueError(f"levels: {self.name} has no level {min(unknown)}; it has 1 to {max(shares)}")
        self.names = names_of(names)
        self.shares = {level: share for level, share in shares.items() if level in (levels or shares)}

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks whose questions, and whose paths of entities from first name to answer, occur in one split only.

        If ``sizes`` name a split ``compositional``, its chains of two or three relations occur in no other split. The
        ids contain a digest of the settings, the seed and the sizes, so that two draws share none.

        Raises ValueError if ``sizes`` ask for more questions than exist, or for compositional ones of level 1 alone.
        """
        random = Random(f"{self.name}-{seed}")
        drawn = digest(self.name, self.version, len(self.names), list(self.shares), seed, sizes)
        questions = {level: self._questions(level, random) for level in self.shares}
        reserved = self._reserve(questions, seed) if sizes.get("compositional") else {}
        owner: dict[tuple[str, ...], str] = {}  # path of entities -> split
        splits: dict[str, list[Task]] = {}
        for split, size in sizes.items():
            rows = []
            pool = reserved if split == "compositional" else questions
            if size and not pool:
                raise ValueError(f"{split}: questions of level 1 are made of one relation; add 2 or 3 to `levels`")
            for number, level in enumerate(self._levels(size, random, list(pool))):
                if not pool[level]:
                    raise ValueError(
                        f"{split}: {size} asks for more level-{level} questions than exist; use fewer tasks, "
                        f"or set `names` to more than {len(self.names)}"
                    )
                start, relations = pool[level].pop()
                while True:
                    facts = self._facts(start, random)
                    path = _walk(facts, start, relations)
                    if len(set(path)) == len(path) and owner.setdefault(tuple(path), split) == split:
                        break
                rows.append(
                    Task(
                        task_id=f"{self.name}-{drawn}-{split}-{number:05d}",
                        env=self.name,
                        split=split,
                        level=level,
                        prompt=self.question(start, relations),
                        tools=json.dumps(self.tools),
                        ground_truth=json.dumps(path[-1]),
                        metadata=json.dumps(self._metadata(facts, start, relations)),
                    )
                )
            splits[split] = rows
        return splits

    async def reset(self, task: Task) -> LookupEpisode:
        return LookupEpisode(task)

    def question(self, start: str, relations: Sequence[str]) -> str:
        """``relations`` in the order of the calls; the question names them from the last to the first."""
        return " of the ".join(self.words[relation] for relation in reversed(relations)) + f" of {start}?"

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """Questions that the answer of a row solves, about the same facts: each chain of its calls that ends at the
        answer, the longest last. A chain may leave out calls that led elsewhere."""
        last = row.messages[-1]
        if last.role is not Role.ASSISTANT or last.tool_calls:
            return []
        facts: dict[str, dict[str, str]] = json.loads(task.metadata)["facts"]
        asked = _asked(row, facts)
        tasks: list[Task] = []
        path, relations = [last.content], list[str]()
        for who, relation, value in reversed(asked):
            fits = relation in (LINKS if relations else VALUES) and exact_match(path[0], value)
            if not fits or who in path or len(relations) == max(LEVEL_SHARES):
                continue
            path, relations = [who, *path], [relation, *relations]
            if self.question(who, relations) != task.prompt:
                tasks.append(self._about(task, facts, who, relations))
        return tasks

    def goal(self, task: Task) -> str:
        """The path of entities from the first name to the answer, which tasks of two splits never share."""
        metadata = json.loads(task.metadata)
        return " ".join(_walk(metadata["facts"], metadata["start"], metadata["relations"]))

    def composition(self, task: Task) -> str:
        """The chain of relations, which tasks of the split ``compositional`` share with no other split."""
        return " ".join(json.loads(task.metadata)["relations"])

    def vary(self, task: Task, random: Random) -> Task | None:
        """Another question about the facts of a task: of one relation more or less, of another relation, or of another
        person. None if there is none whose path has no entity twice."""
        metadata = json.loads(task.metadata)
        facts, start, relations = metadata["facts"], metadata["start"], metadata["relations"]
        links, value = relations[:-1], relations[-1]
        ways = [
            [(start, [*links[:at], link, *links[at:], value]) for at in range(len(relations)) for link in LINKS],
            [(start, [*links[:at], *links[at + 1 :], value]) for at in range(len(links))],
            [(start, [*links, other]) for other in VALUES if other != value],
            [(other, relations) for other in facts if other != start],
        ]
        possible = [
            questions
            for way in ways
            if (questions := [question for question in way if self._is_question(facts, *question)])
        ]
        return self._about(task, facts, *random.choice(random.choice(possible))) if possible else None

    def proposed(self, text: str, like: Task, random: Random) -> Task | None:
        """The task of a question that somebody wrote, with facts of its own; None if it is no question of this kind."""
        *asked, start = text.strip().removesuffix("?").replace(" of the ", " of ").split(" of ")
        relation_of = {word: relation for relation, word in self.words.items()}
        relations = [relation_of.get(word.strip(), "") for word in reversed(asked)]
        if start not in self.names or not relations:
            return None
        for _ in range(DRAWS):
            facts = self._facts(start, random)
            if self._is_question(facts, start, relations):
                return self._about(like, facts, start, relations)
        return None

    def _is_question(self, facts: dict[str, dict[str, str]], start: str, relations: list[str]) -> bool:
        """Whether relations lead from a person over links to a value, and no entity comes twice on the way."""
        if len(relations) > max(self.level_shares) or relations[-1] not in VALUES or set(relations[:-1]) - set(LINKS):
            return False
        path = _walk(facts, start, relations)
        return len(set(path)) == len(path)

    def _about(self, task: Task, facts: dict[str, dict[str, str]], start: str, relations: list[str]) -> Task:
        """Another question about the facts of a task, of its split, with an id that says so."""
        return task.model_copy(
            update={
                "task_id": f"{task.task_id}+{digest(start, relations)}",
                "level": len(relations),
                "prompt": self.question(start, relations),
                "ground_truth": json.dumps(_walk(facts, start, relations)[-1]),
                "metadata": json.dumps(self._metadata(facts, start, relations)),
            }
        )

    def reflect(self, row: Trajectory, task: Task) -> str:
        """The first call of a failed attempt that does not follow the question, or where it gave up."""
        metadata = json.loads(task.metadata)
        who = metadata["start"]
        calls = iter([call.parsed() for message in row.messages for call in message.tool_calls])
        for relation in metadata["relations"]:
            asked = next(calls, None)
            if asked is None:
                return f"go on at {who}"
            if asked != {"who": who, "rel": relation}:
                return f"not {asked.get('rel')} of {asked.get('who')}" if isinstance(asked, dict) else ""
            who = metadata["facts"][who][relation]
        return "answer what the last call returned"

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """A scripted expert that errs with probability ``noise`` at each turn: it asks for a wrong relation, about a
        wrong person, or answers too early."""
        metadata = json.loads(task.metadata)
        who, people = metadata["start"], list(metadata["facts"])
        for number, relation in enumerate(self._understood(metadata["relations"], random)):
            slip = random.choice(["relation", "person", "early"]) if random.random() < noise else None
            if slip == "early" and number > 0:
                break
            rel = random.choice([*LINKS, *VALUES]) if slip == "relation" else relation
            asked = random.choice(people) if slip == "person" else who
            call = ToolCall(id=f"call_{number}", name="find", arguments=json.dumps({"who": asked, "rel": rel}))
            [observation] = yield Message(role=Role.ASSISTANT, tool_calls=[call])
            who = observation.content
        yield Message(role=Role.ASSISTANT, content=who)

    def _understood(self, relations: list[str], random: Random) -> list[str]:
        """The relations that the expert takes a question to ask for."""
        return relations

    def _metadata(self, facts: dict[str, dict[str, str]], start: str, relations: list[str]) -> dict[str, Any]:
        return {"facts": facts, "start": start, "relations": relations}

    def _levels(self, size: int, random: Random, levels: list[int]) -> list[int]:
        if not size:
            return []
        whole = sum(self.shares[level] for level in levels)
        counts = {level: round(size * self.shares[level] / whole) for level in levels}
        counts[max(counts)] += size - sum(counts.values())
        drawn = [level for level, count in counts.items() for _ in range(count)]
        random.shuffle(drawn)
        return drawn

    @staticmethod
    def _reserve(questions: dict[int, list[Question]], seed: int) -> dict[int, list[Question]]:
        """Take the questions of a seeded share of the chains of each level above 1 out of ``questions``."""
        random = Random(f"lookup-chains-{seed}")
        reserved = {}
        for level in [level for level in questions if level > 1]:
            chains = sorted({tuple(relations) for _, relations in questions[level]})
            chosen = set(random.sample(chains, round(RESERVED * len(chains))))
            reserved[level] = [question for question in questions[level] if tuple(question[1]) in chosen]
            questions[level] = [question for question in questions[level] if tuple(question[1]) not in chosen]
        return reserved

    def _questions(self, level: int, random: Random) -> list[Question]:
        chains: list[list[str]] = [[]]
        for _ in range(level - 1):
            chains = [[*chain, link] for chain in chains for link in LINKS]
        questions = [(name, [*chain, value]) for name in self.names for chain in chains for value in VALUES]
        random.shuffle(questions)
        return questions

    def _facts(self, start: str, random: Random) -> dict[str, dict[str, str]]:
        people = [start, *random.sample([name for name in self.names if name != start], PEOPLE_PER_TASK - 1)]
        random.shuffle(people)
        return {
            person: {link: random.choice([other for other in people if other != person]) for link in LINKS}
            | {value: random.choice(options) for value, options in VALUES.items()}
            for person in people
        }
