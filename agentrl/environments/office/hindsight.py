"""Errands that an episode did, whatever it was asked to do: those of levels 1 and 2, of one application.

Later levels ask for several files, events and texts at once; an episode seldom does all of that by chance.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from agentrl.environments.office.tasks import Errand, cell_of, filing_of, is_single, reply_to, told_by
from agentrl.environments.office.world import COLUMNS, FOLDERS, PEOPLE, ROWS, SHEETS, TOPICS, OfficeState, figure


def done(office: OfficeState, state: Mapping[str, Any]) -> Iterator[tuple[int, Errand]]:
    """Errands with their levels, by the final state of an episode: what its answer tells of what it has read, the mails
    that it has moved, and its draft."""
    if state["violations"]:
        return
    read = [(app, given) for app, operation, given in state["actions"] if operation == "read"]
    answer = state["answer"] or ""
    cells = [(given["name"], given.get("cells")) for app, given in read if app == "drive"]
    for name, place in product(SHEETS, (f"{column}{row}" for column in COLUMNS for row in ROWS)):
        if (name, place) in cells and _tells(answer, office.files[name].cells[place]):
            yield 1, cell_of(office, name, place)
    mails = [office.mails[given["number"]] for app, given in read if app == "mail"]
    for mail in mails:
        if is_single(office, mail) and _tells(answer, figure(mail)):
            yield 1, told_by(mail)
    for folder, topic, person in product(FOLDERS, TOPICS, PEOPLE):
        errand = filing_of(office, topic, person, folder)
        if errand and errand.goals[0]["numbers"] == state["moved"].get(folder):
            yield 2, errand
    if len(state["drafts"]) == 1:
        [[to, subject, body]] = state["drafts"]
        for mail in office.mails.values():
            if is_single(office, mail) and mail.sender == to and mail.subject in subject and figure(mail) in body:
                yield 2, reply_to(mail)


def _tells(answer: str, number: str) -> bool:
    """Whether an answer names a number, and no other one."""
    words = answer.replace(".", " ").replace(",", " ").split()
    return {word for word in words if word.isdigit()} == {number}
