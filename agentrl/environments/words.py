"""``words``: `lookup` whose questions name relations by words of their own, most of which no demonstrator understands.

"beast of the foe of Ann?" asks for the pet of the rival. The expert knows the words that are not ``unknown``, and takes
for each of the others a relation at random: a link for a link, a value for a value. So demonstrations show how to act,
and say nothing of what these words mean. Only rewards do, and no temperature finds it.

A success is not luck: nobody shares a value with another, and the links of a person lead to five different people, so
that a wrong relation gives a wrong answer unless a second error takes it back.
"""

from collections.abc import Mapping
from random import Random
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from agentrl.environments.lookup import LINKS, MOST_NAMES, NAMES, VALUES, LookupEnvironment

WORDS = {
    "rival": "foe", "pet": "beast", "boss": "chief", "job": "trade", "mentor": "guide",
    "car": "ride", "cousin": "kin", "dish": "meal", "friend": "pal", "city": "town",
}  # fmt: skip
"""Relation -> its word in questions, in the order in which ``unknown`` takes them from the expert."""
PEOPLE = len(LINKS) + 1


def _are_words(unknown: int | list[str]) -> int | list[str]:
    for text in [] if isinstance(unknown, int) else unknown:
        if text not in WORDS.values():
            raise ValueError(f"{text!r} is no word of questions; they are {', '.join(WORDS.values())}")
    return unknown


class WordsEnvironment(LookupEnvironment):
    """The environment; see the module's docstring. The subgoals of a task are named by its words."""

    name = "words"
    version = "1"
    level_shares: Mapping[int, float] = {1: 0.2, 2: 0.5, 3: 0.3}
    words = WORDS

    def __init__(
        self,
        unknown: Annotated[
            Annotated[int, Field(ge=0, le=len(WORDS))] | list[str],
            AfterValidator(_are_words),
            Field(description="words that the scripted expert does not know: so many, of ten, or these"),
        ] = 7,
        names: Annotated[
            int, Field(ge=PEOPLE, le=MOST_NAMES, description="first names; 155 questions start with each")
        ] = len(NAMES),
        levels: Annotated[
            list[int] | None, Field(min_length=1, description="levels of the tasks that are drawn; None: all")
        ] = None,
    ) -> None:
        super().__init__(names, levels)
        _are_words(unknown)
        words = list(WORDS.values())[:unknown] if isinstance(unknown, int) else unknown
        self.unknown = frozenset(relation for relation, word in WORDS.items() if word in words)

    def _metadata(self, facts: dict[str, dict[str, str]], start: str, relations: list[str]) -> dict[str, Any]:
        """With the names of subgoals, and the steps that someone who knows all words takes."""
        named = {"subgoals": [WORDS[relation] for relation in relations], "optimal_steps": len(relations) + 1}
        return super()._metadata(facts, start, relations) | named

    def _understood(self, relations: list[str], random: Random) -> list[str]:
        kinds = [LINKS if relation in LINKS else list(VALUES) for relation in relations]
        return [
            random.choice(kind) if relation in self.unknown else relation
            for relation, kind in zip(relations, kinds, strict=True)
        ]

    def _facts(self, start: str, random: Random) -> dict[str, dict[str, str]]:
        people = [start, *random.sample([name for name in self.names if name != start], PEOPLE - 1)]
        random.shuffle(people)
        values = {value: random.sample(options, PEOPLE) for value, options in VALUES.items()}
        return {
            person: dict(zip(LINKS, random.sample([other for other in people if other != person], 5), strict=True))
            | {value: drawn[number] for value, drawn in values.items()}
            for number, person in enumerate(people)
        }
