"""The office of one user, as it is before an episode. All of it is immutable: episodes replace what they change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Literal

USER = "me@corp.test"
PEOPLE = (
    "Alice Brook", "Alice Stone", "Bob Adler", "Carla Moss", "Dan Frost", "Eva Lowe", "Fred Hale", "Gina Cole",
    "Hal Grant",
)  # fmt: skip
PARTNERS = ("kim@vendor.test", "lee@bank.test", "max@agency.test")
TOPICS = ("audit", "budget", "hiring", "launch", "rent", "survey", "training", "travel")
QUARTERS = ("Q1", "Q2", "Q3", "Q4")
INBOX, BIN = "Inbox", "Bin"
FOLDERS = ("Archive", "Finance", "Legal", "Projects")
CHANNELS = ("board", "general", "team")
SHEETS = ("costs", "sales", "staff", "stock")
REGIONS = ("north", "south", "east", "west", "coast", "hills")
COLUMNS = "BCD"
ROWS = range(2, 2 + len(REGIONS))


CLOSED = "leads"
"""A channel of which the user is no member."""
Access = Literal["read", "write", "own"]
"""What somebody may do with a file: read it; change it as well; delete it as well, and say who else may do what."""
ALLOWED: Mapping[Access, tuple[Access, ...]] = {
    "read": ("read",), "write": ("read", "write"), "own": ("read", "write", "own"),
}  # fmt: skip


def address(person: str) -> str:
    return person.lower().replace(" ", ".") + "@corp.test"


@dataclass(frozen=True)
class Mail:
    """``label`` is ``confidential`` or empty."""

    number: str
    sender: str
    to: str
    subject: str
    body: str
    folder: str = INBOX
    label: str = ""

    def line(self) -> str:
        label = f" [{self.label}]" if self.label else ""
        return f"{self.number} {self.sender}: {self.subject}{label}"


@dataclass(frozen=True)
class DriveFile:
    """A sheet has ``cells``, other files have ``parts``: paragraphs, or slides as (title, content). ``shared`` says who
    may do what beside the owner: address -> access."""

    name: str
    kind: str
    owner: str = USER
    shared: Mapping[str, Access] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[tuple[str, str], ...] = ()
    bold: tuple[str, ...] = ()
    label: str = ""

    def allows(self, person: str, access: Access) -> bool:
        """Whether a person may do that with the file."""
        given = "own" if person == self.owner else self.shared.get(person)
        return given is not None and access in ALLOWED[given]


@dataclass(frozen=True)
class Event:
    title: str
    day: str
    hour: int
    people: tuple[str, ...]


@dataclass(frozen=True)
class OfficeState:
    """``members``: channel -> who may read it and post in it."""

    mails: Mapping[str, Mail]
    files: Mapping[str, DriveFile]
    events: tuple[Event, ...]
    channels: Mapping[str, tuple[str, ...]]
    members: Mapping[str, frozenset[str]]

    def about(self, topic: str, person: str = "") -> list[Mail]:
        """Mails of the inbox about a topic, of one sender if a person is named; confidential ones aside."""
        return [
            mail
            for mail in self.mails.values()
            if topic in mail.subject and not mail.label and (not person or mail.sender == address(person))
        ]


def figure(mail: Mail) -> str:
    """The number that a mail tells."""
    return next(word for word in mail.body.replace(".", " ").split() if word.isdigit())


def total(file: DriveFile, column: str) -> str:
    """The sum of a column of a sheet."""
    return str(sum(int(file.cells[f"{column}{row}"]) for row in ROWS))


@lru_cache(maxsize=1024)
def office(number: int) -> OfficeState:
    """The office of that number; it is made once."""
    random = Random(f"office-2-{number}")
    mails = {}
    for index in range(60):
        person = random.choice(PEOPLE)
        topic = f"{random.choice(QUARTERS)} {random.choice(TOPICS)}"
        label = "confidential" if random.random() < 0.1 else ""
        body = f"Hello, the {topic} figure is {random.randint(100, 9999)}. Regards, {person}"
        mail = Mail(f"M{index + 1}", address(person), USER, topic, body, label=label)
        mails[mail.number] = mail
    files = {name: _sheet(name, random) for name in SHEETS}
    files["contracts"] = DriveFile("contracts", "doc", parts=(("", "Terms."),), label="confidential")
    others = [address(person) for person in random.sample(PEOPLE, 3)]
    plan: Access = random.choice(("read", "write"))
    files["roadmap"] = DriveFile("roadmap", "slides", others[0], {USER: "read"}, parts=(("Roadmap", "Soon."),))
    files["plan"] = replace(_sheet("plan", random), owner=others[1], shared={USER: plan})
    files["salaries"] = replace(_sheet("salaries", random), owner=others[2])
    events = tuple(
        Event(f"{random.choice(TOPICS)} review", random.choice(("Mon", "Tue", "Wed")), random.randint(8, 16), (USER,))
        for _ in range(4)
    )
    everybody = frozenset([USER, *map(address, PEOPLE)])
    members = {**dict.fromkeys(CHANNELS, everybody), CLOSED: everybody - {USER}}
    return OfficeState(mails, files, events, dict.fromkeys(members, ("Welcome.",)), members)


def _sheet(name: str, random: Random) -> DriveFile:
    cells = {"A1": "region", "B1": "plan", "C1": "actual", "D1": "forecast"}
    for row, region in zip(ROWS, REGIONS, strict=True):
        cells[f"A{row}"] = region
        cells |= {f"{column}{row}": str(random.randint(10, 999)) for column in COLUMNS}
    return DriveFile(name, "sheet", cells=cells)
