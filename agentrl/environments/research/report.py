"""Checking a report: its numbers against the log of experiments, its citations against what was read."""

import re
from collections.abc import Collection, Mapping

SECTIONS = ("introduction", "method", "results", "conclusion")


def numbers(text: str) -> set[str]:
    """Numbers with a decimal point in a text: measurements have one place after it, settings are whole."""
    return set(re.findall(r"(?<![\w.])[0-9]+\.[0-9]+(?!\w)", text))


def invented_numbers(report: Mapping[str, str], measured: Collection[str]) -> set[str]:
    """Measurements in a report that no tool gave."""
    return {number for text in report.values() for number in numbers(text)} - set(measured)


def citations(text: str) -> set[str]:
    """Numbers of papers that a text cites, as in [P12]."""
    return set(re.findall(r"\[(P[0-9]+)\]", text))


def invented_citations(report: Mapping[str, str], read: Collection[str]) -> set[str]:
    """Cited papers that were not read."""
    return {paper for text in report.values() for paper in citations(text)} - set(read)


def concluded(report: Mapping[str, str], values: Collection[int]) -> set[int]:
    """Which of the values in question the conclusion names, citations aside."""
    text = re.sub(r"\[P[0-9]+\]", "", report.get("conclusion", ""))
    return {int(word) for word in re.findall(r"(?<![\w.-])[0-9]+(?!\w)(?!\.[0-9])", text)} & set(values)
