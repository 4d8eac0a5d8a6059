"""Checks of an answer against the ground truth."""


def exact_match(answer: str, truth: str) -> bool:
    """Equal up to surrounding white space."""
    return answer.strip() == truth.strip()
