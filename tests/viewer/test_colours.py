"""Colours of the style sheet as people with a colour-vision deficiency see them."""

import math
import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from vendor import VENDOR

VISIONS = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Linear sRGB as it is seen (Machado, Oliveira and Fernandes 2009, severity 1)."""
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def colours(theme: str) -> dict[str, np.ndarray]:
    """Linear sRGB of each custom property that is a colour, in a theme."""
    text = (VENDOR.parent / "theme.css").read_text()
    colours = re.findall(r"--([\w-]+): light-dark\(oklch\(([^)]*)\), oklch\(([^)]*)\)\);", text)
    return {name: linear(light if theme == "light" else dark) for name, light, dark in colours}


def linear(oklch: str) -> np.ndarray:
    lightness, chroma, hue = map(float, oklch.split())
    lab = [lightness, chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))]
    return np.clip(np.linalg.inv(TO_LMS) @ (np.linalg.inv(TO_LAB) @ lab) ** 3, 0, 1)


def lab(rgb: np.ndarray, vision: str) -> np.ndarray:
    return TO_LAB @ np.cbrt(TO_LMS @ np.clip(np.array(VISIONS[vision]) @ rgb, 0, 1))


def contrast(first: np.ndarray, other: np.ndarray) -> float:
    """As WCAG 2 computes it."""
    low, high = sorted(float(rgb @ [0.2126, 0.7152, 0.0722]) for rgb in (first, other))
    return (high + 0.05) / (low + 0.05)


def test_white_and_black_are_what_they_are() -> None:
    assert linear("1 0 0") == pytest.approx([1, 1, 1], abs=1e-3)
    assert contrast(linear("1 0 0"), linear("0 0 0")) == pytest.approx(21, rel=0.01)
    assert lab(linear("0.6 0.05 90"), "usual") == pytest.approx([0.6, 0, 0.05], abs=1e-3)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_that_differ_in_meaning_are_seen_to_differ(theme: str, vision: str) -> None:
    """Distances in OKLab; 0.02 is about what one notices side by side."""
    seen = {name: lab(rgb, vision) for name, rgb in colours(theme).items()}

    def apart(first: str, other: str) -> float:
        return float(np.linalg.norm(seen[first] - seen[other]))

    ramps = (
        ["heat-1", "heat-2", "heat-3", "heat-4", "heat-5"],
        *([f"{sign}-{n}" for n in range(1, 5)] for sign in ("minus", "plus")),
    )
    for ramp in ramps:
        assert all(apart(first, other) > 0.02 for first, other in pairwise(ramp)), ramp
        steps = [seen[name][0] for name in ramp]
        assert steps == sorted(steps, reverse=theme == "light"), ramp  # lightness alone tells the order
    for n in (2, 3, 4):
        assert apart(f"minus-{n}", f"plus-{n}") > 0.04, n
    kinds = [f"kind-{n}" for n in range(6)]
    assert {pair: apart(*pair) for pair in combinations(kinds, 2) if apart(*pair) < 0.02} == {}
    assert apart("good", "bad") > 0.04
    assert apart("accent", "bar") > 0.1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    seen = colours(theme)
    behind = ["paper", "chosen", "raised", *(name for name in seen if re.match(r"heat|plus|minus|kind|trained", name))]
    assert min(contrast(seen["ink"], seen[name]) for name in behind) >= 4.5
    for name in ("accent", "good", "bad", "waits"):
        assert min(contrast(seen[name], seen[ground]) for ground in ("paper", "chosen", "raised")) >= 4.5, name
