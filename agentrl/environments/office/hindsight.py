"""Errands that an episode did, whatever it was asked to do: those of levels 1 and 2, of one application.

Later levels ask for several files, events and texts at once; an episode seldom does all of that by chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from agentrl.environments.office.tasks import (
    Errand,
    cell_of,
    filing_of,
    is_single,
    larger_of,
    meet_of,
    reply_to,
    say_of,
)
from agentrl.environments.office.world import COLUMNS, PEOPLE, ROWS, SHEETS, OfficeState, address, figure


def done(office: OfficeState, state: Mapping[str, Any]) -> Iterator[tuple[int, Errand]]:
    """Errands with their levels, by the final state of an episode: what its answer tells of what it has read, what it
    has posted, whom it has invited, the mails that it has moved, and its draft."""
    if state["violations"]:
        return
    yield from ((1, errand) for errand in _single_steps(office, state))
    yield from ((2, errand) for errand in _of_mail(office, state))


def _single_steps(office: OfficeState, state: Mapping[str, Any]) -> Iterator[Errand]:
    read = {(given["name"], given.get("cells")) for given in _read(state, "drive")}
    for name, cell in product(SHEETS, (f"{column}{row}" for column in COLUMNS for row in ROWS)):
        if (name, cell) in read and _told(state) == {office.files[name].cells[cell]}:
            yield cell_of(office, name, cell)
    for channel, posts in state["posted"].items():
        if len(posts) == 1 and posts[0].strip():
            yield say_of(channel, posts[0])
    for title, day, hour, people in state["invited"]:
        if len(people) == 1:
            yield meet_of(title, day, hour, people[0])


def _of_mail(office: OfficeState, state: Mapping[str, Any]) -> Iterator[Errand]:
    mails = [office.mails[given["number"]] for given in _read(state, "mail")]
    single = [mail for mail in mails if is_single(office, mail)]
    for pair in combinations(single, 2):
        if _told(state) == {max(map(figure, pair), key=int)}:
            yield larger_of(pair)
    placed = [(folder, _about(office, numbers)) for folder, numbers in sorted(state["moved"].items())]
    for (first, (sender, topic)), (other, (second, further)) in combinations(placed, 2):
        person = next((person for person in PEOPLE if address(person) == sender == second), None)
        errand = filing_of(office, person, [(topic, first), (further, other)]) if person and topic != further else None
        if errand and all(goal["numbers"] == state["moved"][goal["folder"]] for goal in errand.goals):
            yield errand
    if len(state["drafts"]) == 1:
        [[to, subject, body]] = state["drafts"]
        for mail in office.mails.values():
            if is_single(office, mail) and mail.sender == to and mail.subject in subject and figure(mail) in body:
                yield reply_to(mail)


def _about(office: OfficeState, numbers: Sequence[str]) -> tuple[str, str]:
    """The sender and the topic of the first of some mails."""
    mail = office.mails[numbers[0]]
    return mail.sender, mail.subject.split()[-1]


def _read(state: Mapping[str, Any], app: str) -> list[Mapping[str, Any]]:
    """The parameters of the reads of an application."""
    return [given for where, operation, given in state["actions"] if (where, operation) == (app, "read")]


def _told(state: Mapping[str, Any]) -> set[str]:
    """The numbers that the answer names."""
    words = (state["answer"] or "").replace(".", " ").replace(",", " ").split()
    return {word for word in words if word.isdigit()}
