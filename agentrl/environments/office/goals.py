"""What should be true at the end, and how far it is: on the levels ``exists``, ``content`` and ``semantics``.

A goal is a kind and its values, which are JSON. An empty file exists and has no content; a file with the right words in
the wrong place has content and not the right semantics.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentrl.environments.office.apps import Desk
from agentrl.environments.office.world import BIN

Goal = Mapping[str, Any]


class Found(NamedTuple):
    """How far a goal is reached."""

    exists: bool
    content: bool
    semantics: bool


NOTHING = Found(False, False, False)


def check(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """How far a goal is reached."""
    return CHECKS[goal["kind"]](goal, desk, answer)


def _answer(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """The answer names what is asked, and no other number."""
    if not answer or not answer.strip():
        return NOTHING
    words = answer.replace(".", " ").replace(",", " ").split()
    numbers = {word for word in words if word.isdigit()}
    there = goal["text"] in words
    return Found(True, there, there and numbers <= {goal["text"]})


def _moved(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """These mails and no others are in the folder."""
    inside = {mail.number for mail in desk.mails.values() if mail.folder == goal["folder"]}
    wanted = set(goal["numbers"])
    return Found(bool(inside & wanted), wanted <= inside, wanted == inside)


def _mail(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """A mail to the right person whose text says all that it should; as a draft, or sent."""
    box = desk.drafts if goal["kind"] == "draft" else desk.sent
    mails = [mail for mail in box.values() if mail.to == goal["to"]]
    full = [mail for mail in mails if all(word in mail.body for word in goal["words"])]
    return Found(bool(mails), bool(full), len(box) == 1 and any(goal["subject"] in mail.subject for mail in full))


def _cells(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """A sheet with these cells; a new one has no others."""
    file = desk.files.get(goal["file"])
    if file is None or file.kind != "sheet":
        return NOTHING
    values = sorted(goal["cells"].values())
    content = all(value in file.cells.values() for value in values)
    right = all(file.cells.get(cell) == value for cell, value in goal["cells"].items())
    return Found(True, content, right and (not goal["new"] or len(file.cells) == len(values)))


def _bold(goal: Goal, desk: Desk, answer: str | None) -> Found:
    file = desk.files.get(goal["file"])
    bold = set(file.bold) if file else set()
    return Found(bool(bold), goal["cell"] in bold, bold == {goal["cell"]})


def _parts(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """A file with these slides: each with its title, and the words of its content."""
    file = desk.files.get(goal["file"])
    if file is None or file.kind != "slides":
        return NOTHING
    text = " ".join(" ".join(part) for part in file.parts)
    content = all(word in text for _, words in goal["slides"] for word in words)
    right = len(file.parts) == len(goal["slides"]) and all(
        title in part[0] and all(word in part[1] for word in words)
        for part, (title, words) in zip(file.parts, goal["slides"], strict=True)
    )
    return Found(True, content, content and right)


def _post(goal: Goal, desk: Desk, answer: str | None) -> Found:
    posts = desk.channels[goal["channel"]][1:]
    full = [post for post in posts if all(word in post for word in goal["words"])]
    return Found(bool(posts), bool(full), len(posts) == 1 and bool(full))


def _event(goal: Goal, desk: Desk, answer: str | None) -> Found:
    events = [event for event in desk.events if event.title == goal["title"]]
    timed = [event for event in events if (event.day, event.hour) == (goal["day"], goal["hour"])]
    return Found(bool(events), bool(timed), any(sorted(event.people) == sorted(goal["people"]) for event in timed))


def _binned(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """This mail and no other is in the bin."""
    inside = {mail.number for mail in desk.mails.values() if mail.folder == BIN}
    return Found(bool(inside), goal["number"] in inside, inside == {goal["number"]})


def _declined(goal: Goal, desk: Desk, answer: str | None) -> Found:
    """The answer says that it may not be done."""
    declined = "may not" in (answer or "").lower()
    return Found(bool(answer), declined, declined)


CHECKS: Mapping[str, Callable[[Goal, Desk, str | None], Found]] = {
    "answer": _answer,
    "moved": _moved,
    "draft": _mail,
    "sent": _mail,
    "cells": _cells,
    "bold": _bold,
    "parts": _parts,
    "post": _post,
    "event": _event,
    "binned": _binned,
    "declined": _declined,
}
