"""Agreement of two raters."""

from collections.abc import Mapping


def kappa(cells: Mapping[tuple[bool, bool], int]) -> float | None:
    """Cohen's kappa (Cohen 1960) of two raters who say yes or no; ``cells`` counts each pair of their answers. None if
    chance alone makes them agree always, or if there is no pair."""
    total = sum(cells.values())
    if not total:
        return None
    agreed = (cells.get((True, True), 0) + cells.get((False, False), 0)) / total
    first = sum(count for (first_says, _), count in cells.items() if first_says) / total
    second = sum(count for (_, other), count in cells.items() if other) / total
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else (agreed - chance) / (1 - chance)
