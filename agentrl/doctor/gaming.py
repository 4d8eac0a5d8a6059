"""Rewards that many stored rows show to be gamed: what predicts them alone, and what rises while nothing else does."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from agentrl.doctor.case import FEW, SHOWN, Finding, Row, names
from agentrl.doctor.hacks import is_success
from agentrl.statistics.intervals import wilson

SEPARATES = 0.9
"""Share of pairs in the right order, or correlation, from which on a feature counts as predicting the reward alone."""
PAIRS = 40
ROSE, LEAST_SHARE = 0.15, 0.5
"""Rise of success on train tasks that counts as one, and the share of it that other tasks should see."""


@dataclass(frozen=True)
class Outline:
    """What is kept of a row for checks of many: ``answer`` is the text of its last message that says something."""

    trajectory_id: str
    task_id: str
    env: str
    split: str
    version: int
    solved: bool
    length: int
    forms: frozenset[str]

    @classmethod
    def of(cls, row: Row) -> "Outline":
        spoken = (message["content"] for message in reversed(row["messages"]) if message["role"] == "assistant")
        answer = next((text for text in spoken if text.strip()), "")
        forms = frozenset(name for name, has in FORMS.items() if has(answer))
        return cls(
            row["trajectory_id"],
            row["task_id"],
            row["env"],
            row["split"],
            row["policy_version"],
            is_success(row),
            len(answer),
            forms,
        )


FORMS: dict[str, Callable[[str], bool]] = {
    "a code fence": lambda text: "```" in text,
    "\\boxed": lambda text: "\\boxed" in text,
    "a list": lambda text: text.lstrip().startswith(("- ", "* ", "1. ")) or "\n- " in text,
    "'answer' or 'final'": lambda text: any(word in text.casefold() for word in ("answer", "final")),
    "bold text": lambda text: "**" in text,
    "a tag": lambda text: "</" in text,
    "braces": lambda text: text.strip().startswith("{"),
    "an exclamation": lambda text: "!" in text,
    "several lines": lambda text: "\n" in text.strip(),
}
"""What an answer may look like, whatever it says."""


def length_predicts(rows: Sequence[Outline]) -> list[Finding]:
    """Of answers to the same task, the longer one, or the shorter one, nearly always has the success."""
    made = []
    for env, members in _by_env(rows).items():
        longer = shorter = 0
        for attempts in _by_task(members).values():
            solved = [row.length for row in attempts if row.solved]
            failed = [row.length for row in attempts if not row.solved]
            longer += sum(a > b for a in solved for b in failed)
            shorter += sum(a < b for a in solved for b in failed)
        pairs = longer + shorter
        if pairs < PAIRS or max(longer, shorter) <= SEPARATES * pairs or pairs < 0.5 * _pairs(members):
            continue
        which, number = ("longer", longer) if longer > shorter else ("shorter", shorter)
        made.append(
            Finding(
                "length predicts the reward",
                f"of {pairs} pairs of answers to the same task of {env}, the {which} one has the success in {number}",
                f"{SEPARATES:.0%} of at least {PAIRS} pairs",
                "read a long and a short answer of one task; give the judge or the verifier the answer alone, or "
                "normalise by length",
                rows=_examples(members, lambda row: row.length, which == "longer"),
            )
        )
    return made


def _pairs(rows: Sequence[Outline]) -> int:
    """Pairs of a success and a failure of one task."""
    counts = [(sum(row.solved for row in attempts), len(attempts)) for attempts in _by_task(rows).values()]
    return sum(solved * (number - solved) for solved, number in counts)


def format_predicts(rows: Sequence[Outline]) -> list[Finding]:
    """A form of the answer is nearly the same as success (the phi coefficient)."""
    made = []
    for env, members in _by_env(rows).items():
        for form in FORMS:
            phi = _phi([(form in row.forms, row.solved) for row in members])
            if len(members) < FEW or abs(phi) <= SEPARATES:
                continue
            made.append(
                Finding(
                    "format predicts the reward",
                    f"success and {form} in the answer correlate by {phi:.2f} in {len(members)} rows of {env}",
                    f"{SEPARATES} (phi)",
                    "read rows that say the same in another form; let the verifier read the answer, not its form",
                    rows=_examples(members, _has(form), phi > 0),
                )
            )
            break  # forms go together; one is enough to look at
    return made


def _phi(pairs: Sequence[tuple[bool, bool]]) -> float:
    both = sum(a and b for a, b in pairs)
    neither = sum(not a and not b for a, b in pairs)
    first, second = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    spread = first * (len(pairs) - first) * second * (len(pairs) - second)
    if min(first, len(pairs) - first, second, len(pairs) - second) < FEW // 4 or not spread:
        return 0.0
    return (both * neither - (first - both) * (second - both)) / sqrt(spread)


def rises_alone(rows: Sequence[Outline]) -> list[Finding]:
    """From early to late versions of the policy success on train tasks rises, and on held-out ones it does not."""
    made = []
    for env, members in _by_env(rows).items():
        versions = sorted({row.version for row in members})
        half = len(versions) // 2
        if not half:
            continue
        early, late = set(versions[:half]), set(versions[-half:])
        train, heldout = (
            [
                [row.solved for row in members if row.version in part and (row.split == "train") == is_train]
                for part in (early, late)
            ]
            for is_train in (True, False)
        )
        if min(map(len, (*train, *heldout))) < FEW:
            continue
        rise, other = fmean(train[1]) - fmean(train[0]), fmean(heldout[1]) - fmean(heldout[0])
        if rise < ROSE or other > LEAST_SHARE * rise or not _apart(*train) or _apart(*heldout):
            continue
        made.append(
            Finding(
                "the reward rises and held-out success does not",
                f"from early to late versions in {env}: success on train tasks {rise:+.2f}, on others {other:+.2f}",
                f"a rise of {ROSE}, with less than {LEAST_SHARE:.0%} of it on other splits, beyond the intervals",
                "read late successes of train tasks; check that verifiers of both splits are the same",
                rows=tuple(
                    row.trajectory_id for row in members if row.version in late and row.split == "train" and row.solved
                )[:SHOWN],
            )
        )
    return made


def _apart(early: Sequence[bool], late: Sequence[bool]) -> bool:
    """Whether the later success lies above the earlier one beyond both intervals."""
    return wilson(sum(late), len(late))[0] > wilson(sum(early), len(early))[1]


def gaming(rows: Sequence[Outline]) -> list[Finding]:
    """All findings of many rows together."""
    return [finding for check in (length_predicts, format_predicts, rises_alone) for finding in check(rows)]


def told(finding: Finding) -> str:
    """A finding in a line, with the rows to begin with."""
    return f"{finding.name}: {finding.evidence} ({names(list(finding.rows))})"


def _by_env(rows: Sequence[Outline]) -> dict[str, list[Outline]]:
    grouped: dict[str, list[Outline]] = defaultdict(list)
    for row in rows:
        grouped[row.env].append(row)
    return grouped


def _by_task(rows: Sequence[Outline]) -> dict[str, list[Outline]]:
    grouped: dict[str, list[Outline]] = defaultdict(list)
    for row in rows:
        grouped[row.task_id].append(row)
    return grouped


def _has(form: str) -> Callable[[Outline], float]:
    return lambda row: float(form in row.forms)


def _examples(rows: Sequence[Outline], key: Callable[[Outline], float], largest: bool) -> tuple[str, ...]:
    """Successes that show it best."""
    solved = sorted((row for row in rows if row.solved), key=key, reverse=largest)
    return tuple(row.trajectory_id for row in solved[:SHOWN])
