"""Tasks of the office: what is asked, the goals, and a way to them.

A way is a list of actions (application, operation, parameters); ``user.ask`` asks the user. The last message is the
answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.environments.office.goals import Goal
from agentrl.environments.office.world import (
    CHANNELS,
    COLUMNS,
    FOLDERS,
    PARTNERS,
    PEOPLE,
    ROWS,
    SHEETS,
    TOPICS,
    Mail,
    OfficeState,
    address,
    figure,
    total,
)

Action = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Errand:
    """``who`` is whom the user means if the request names two people; asking for that is apt then."""

    prompt: str
    goals: Sequence[Goal]
    way: list[Action]
    answer: str = "Done."
    who: str = ""


def ask(question: str) -> Action:
    return ("user", "ask", {"question": question})


def cell(office: OfficeState, random: Random) -> Errand:
    name = random.choice(SHEETS)
    return cell_of(office, name, f"{random.choice(COLUMNS)}{random.choice(ROWS)}")


def cell_of(office: OfficeState, name: str, place: str) -> Errand:
    value = office.files[name].cells[place]
    goals = [{"kind": "answer", "text": value}]
    return Errand(
        f"What is in cell {place} of the sheet {name}?",
        goals,
        [("drive", "read", {"name": name, "cells": place})],
        value,
    )


def told(office: OfficeState, random: Random) -> Errand | None:
    mail = _single(office, random)
    return told_by(mail) if mail else None


def told_by(mail: Mail) -> Errand:
    way: list[Action] = [
        ("mail", "search", {"sender": mail.sender, "subject": mail.subject}),
        ("mail", "read", {"number": mail.number}),
    ]
    prompt = f"Which figure does the mail of {mail.sender} about the {mail.subject} tell?"
    return Errand(prompt, [{"kind": "answer", "text": figure(mail)}], way, figure(mail))


def filing(office: OfficeState, random: Random) -> Errand | None:
    topic, folder = random.choice(TOPICS), random.choice(FOLDERS)
    return filing_of(office, topic, random.choice(PEOPLE), folder)


def filing_of(office: OfficeState, topic: str, person: str, folder: str) -> Errand | None:
    """None if there are too few mails or too many, or a confidential one among those of the topic."""
    mails = office.about(topic, person)
    if not 1 < len(mails) <= 8 or any(topic in mail.subject and mail.label for mail in office.mails.values()):
        return None
    numbers = [mail.number for mail in mails]
    way: list[Action] = [
        ("mail", "search", {"sender": address(person), "subject": topic}),
        ("mail", "move", {"numbers": numbers, "folder": folder}),
    ]
    prompt = f"Move all mails of {address(person)} about {topic} to the folder {folder}."
    return Errand(prompt, [{"kind": "moved", "folder": folder, "numbers": numbers}], way)


def reply(office: OfficeState, random: Random) -> Errand | None:
    mail = _single(office, random)
    return reply_to(mail) if mail else None


def reply_to(mail: Mail) -> Errand:
    """The request names the sender by the first name. If that is the name of two people, the user says which, if he is
    asked; if not, the address is found by it."""
    person = next(one for one in PEOPLE if address(one) == mail.sender)
    first = person.split()[0]
    unclear = sum(one.startswith(first) for one in PEOPLE) > 1
    way: list[Action] = [ask(f"Which {first} do you mean?")] if unclear else []
    body = f"Thank you. I confirm {figure(mail)}."
    way += [
        ("mail", "search", {"sender": mail.sender if unclear else first.lower(), "subject": mail.subject}),
        ("mail", "read", {"number": mail.number}),
        ("mail", "draft", {"name": "reply", "to": mail.sender, "subject": f"Re: {mail.subject}", "body": body}),
    ]
    goals = [{"kind": "draft", "to": mail.sender, "subject": mail.subject, "words": [figure(mail)]}]
    prompt = (
        f"Draft a reply to the mail of {first} about the {mail.subject} that confirms the figure in it. Do not send it."
    )
    return Errand(prompt, goals, way, who=person if unclear else "")


def totals(office: OfficeState, random: Random) -> Errand:
    names, column = random.sample(SHEETS, 3), random.choice(COLUMNS)
    sums = {name: total(office.files[name], column) for name in names}
    largest = max(sums, key=lambda name: (int(sums[name]), name))
    way: list[Action] = []
    goals: list[Goal] = []
    for name in names:
        way.append(("drive", "read", {"name": name, "cells": f"{column}{ROWS[0]}:{column}{ROWS[-1]}"}))
        way.append(("drive", "write", {"name": name, "cells": {f"{column}9": sums[name]}}))
        goals.append({"kind": "cells", "file": name, "cells": {f"{column}9": sums[name]}, "new": False})
    way.append(("drive", "bold", {"name": largest, "cell": f"{column}9"}))
    goals.append({"kind": "bold", "file": largest, "cell": f"{column}9"})
    prompt = (
        f"In each of the sheets {', '.join(names)}, write the total of column {column} into cell {column}9, and make "
        "the largest of these totals bold."
    )
    return Errand(prompt, goals, way)


def collect(office: OfficeState, random: Random) -> Errand | None:
    """Figures of mails into a new sheet, and a word about it in a channel."""
    mails = _figures(office, random)
    if mails is None:
        return None
    name = f"{random.choice(('summary', 'figures', 'overview'))}{random.randint(1, 99)}"
    cells = {"A1": "topic", "B1": "figure"}
    for row, mail in enumerate(mails, 2):
        cells |= {f"A{row}": mail.subject, f"B{row}": figure(mail)}
    channel = random.choice(CHANNELS)
    way = [*_reading(mails), ("drive", "create", {"name": name, "kind": "sheet"})]
    way.append(("drive", "write", {"name": name, "cells": cells}))
    way.append(("chat", "post", {"channel": channel, "text": f"The figures are in {name}."}))
    goals: list[Goal] = [
        {"kind": "cells", "file": name, "cells": cells, "new": True},
        {"kind": "post", "channel": channel, "words": [name]},
    ]
    prompt = (
        f"Find the figures that {mails[0].sender} sent about {_subjects(mails)}, put them into a new sheet {name} with "
        "the columns topic and figure, in this order and with the headings in row 1, and say in the channel "
        f"{channel} where they are."
    )
    return Errand(prompt, goals, way)


def report(office: OfficeState, random: Random) -> Errand | None:
    """Sheet and mails into slides, a meeting about them, a post, and a mail to a partner, which needs a yes."""
    mails = _figures(office, random)
    if mails is None:
        return None
    sheet, column, name = random.choice(SHEETS), random.choice(COLUMNS), f"week{random.randint(1, 52)}"
    whole, partner, channel = total(office.files[sheet], column), random.choice(PARTNERS), random.choice(CHANNELS)
    day, hour, guest = random.choice(("Thu", "Fri")), random.randint(8, 17), address(random.choice(PEOPLE))
    content = "; ".join(f"{mail.subject}: {figure(mail)}" for mail in mails)
    text = f"The total is {whole}."
    way: list[Action] = [
        ("drive", "read", {"name": sheet, "cells": f"{column}{ROWS[0]}:{column}{ROWS[-1]}"}),
        *_reading(mails),
        ("drive", "create", {"name": name, "kind": "slides"}),
        ("drive", "add", {"name": name, "title": "Metrics", "content": text}),
        ("drive", "add", {"name": name, "title": "News", "content": content}),
        ("calendar", "create", {"title": name, "day": day, "hour": hour, "people": [guest]}),
        ("chat", "post", {"channel": channel, "text": f"{name} is ready. {text}"}),
        ("mail", "draft", {"name": "partner", "to": partner, "subject": name, "body": text}),
        ("mail", "preview", {"name": "partner"}),
        ask(f"I will send the draft partner to {partner}. Do you confirm?"),
        ("mail", "send", {"name": "partner"}),
    ]
    slides = [["Metrics", [whole]], ["News", [figure(mail) for mail in mails]]]
    goals: list[Goal] = [
        {"kind": "parts", "file": name, "slides": slides},
        {"kind": "event", "title": name, "day": day, "hour": hour, "people": [guest]},
        {"kind": "post", "channel": channel, "words": [name, whole]},
        {"kind": "sent", "to": partner, "subject": name, "words": [whole]},
    ]
    prompt = (
        f"Prepare the report {name}: slides of that name, the first titled Metrics with the total of column {column} "
        f"of the sheet {sheet}, the second titled News with the figures that {mails[0].sender} sent about "
        f"{_subjects(mails)}. Then invite {guest} to an event {name} on {day} at {hour}:00, post in {channel} that "
        f"{name} is ready, with the total, and mail the total to {partner} with {name} as the subject."
    )
    return Errand(prompt, goals, way)


LEVELS: dict[int, list[Callable[[OfficeState, Random], Errand | None]]] = {
    1: [cell, told],
    2: [filing, reply],
    3: [totals],
    4: [collect],
    5: [report],
}


def _single(office: OfficeState, random: Random) -> Mail | None:
    mail = random.choice(list(office.mails.values()))
    return mail if is_single(office, mail) else None


def is_single(office: OfficeState, mail: Mail) -> bool:
    """Whether the sender and the subject of a mail tell it from all others, and it may be read."""
    same = [one for one in office.mails.values() if (one.sender, one.subject) == (mail.sender, mail.subject)]
    return len(same) == 1 and not mail.label


def _figures(office: OfficeState, random: Random) -> list[Mail] | None:
    """Two or three mails of one sender, about topics of their own."""
    person = address(random.choice(PEOPLE))
    own = [mail for mail in office.mails.values() if mail.sender == person]
    subjects = [mail.subject for mail in own]
    clear = [mail for mail in own if not mail.label and subjects.count(mail.subject) == 1]
    return random.sample(clear, random.choice((2, 3))) if len(clear) >= 3 else None


def _subjects(mails: list[Mail]) -> str:
    return ", ".join(mail.subject for mail in mails)


def _reading(mails: list[Mail]) -> list[Action]:
    """Searches and reads."""
    way: list[Action] = []
    for mail in mails:
        way.append(("mail", "search", {"sender": mail.sender, "subject": mail.subject}))
        way.append(("mail", "read", {"number": mail.number}))
    return way
