"""What a step of decoding draws, and the spans of a session's turns."""

import torch

from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.decoding import draw, uniforms
from agentrl.schemas.trajectory import Span


def test_draws_follow_the_distribution_and_never_take_what_has_no_mass() -> None:
    logits = torch.tensor([float("-inf"), 0.0, 1.0, 2.0, -1.0, float("-inf")]).repeat(40_000, 1)
    numbers = torch.from_numpy(uniforms(3, 40_000).copy())
    numbers[0], numbers[1] = 0.0, 1 - 2**-24
    tokens, logprobs = draw(logits, Sampling(), numbers)
    shares = torch.bincount(tokens, minlength=6) / len(tokens)
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)
    assert shares[0] == shares[5] == 0
    assert torch.allclose(logprobs, logits[0].log_softmax(-1)[tokens], atol=1e-6)


def test_numbers_are_a_function_of_the_seed() -> None:
    assert (uniforms(5, 100)[:10] == uniforms(5, 10)).all()
    assert (uniforms(5, 10) != uniforms(6, 10)).any()
    assert 0 <= uniforms(1, 100_000).min() < uniforms(1, 100_000).max() < 1


def span(version: int, start: int, end: int) -> Span:
    return Span(version=version, start=start, end=end)


def test_spans_run_from_version_to_version() -> None:
    session = Session()
    session.observe([1, 2])
    session.act(Turn([3], [-1.0], [span(0, 0, 1)], "stop"))
    session.act(Turn([4, 5], [-1.0, -1.0], [span(0, 0, 1), span(1, 1, 2)], "stop"))
    session.observe([6])
    session.act(Turn([7], [-1.0], [span(1, 0, 1)], "stop"))
    assert session.spans == [span(0, 2, 4), span(1, 4, 7)]
