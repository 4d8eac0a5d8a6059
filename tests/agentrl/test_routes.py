"""Routes of mixtures of experts: recorded from a pass, and replayed in training."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import FAMILIES, mixture

from agentrl.algorithms.sft import SFT
from agentrl.engines.routes import RouteShape, recording, replaying, route_shape
from agentrl.models.policy import Policy
from agentrl.schemas.training import TrainingRow
from agentrl.training.batch import TrainingError, collate
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer


def rows_of(policy: Policy, lengths: tuple[int, ...] = (17, 30, 24)) -> TrainingRows:
    """Rows of random tokens, all of which begin with the same nine."""
    random = np.random.default_rng(0)
    size = policy.model.config.vocab_size
    shared = random.integers(5, size, 9).tolist()
    made = []
    for number, length in enumerate(lengths):
        ids = [*shared, *random.integers(5, size, length - 9).tolist()]
        mask = [False] * 9 + [True] * (length - 9)
        weights = [1.0] * length
        made.append(TrainingRow(row_id=f"row-{number}", unit=number, input_ids=ids, mask=mask, weights=weights))
    return TrainingRows.of(made)


@torch.no_grad()
def own_routes(policy: Policy, rows: TrainingRows, last: int = 1) -> dict[str, bytes]:
    """What the routers of a policy choose in passes over single rows, without the ``last`` tokens."""
    shape = route_shape(policy.model)
    assert shape
    routes = {}
    for number, name in enumerate(rows.ids()):
        with recording(policy.model) as recorded:
            policy.model(input_ids=torch.tensor(rows.values("input_ids", number))[None])
        routes[name] = torch.stack(recorded, 1)[:-last].numpy().astype(shape.dtype).tobytes()
    return routes


def gradients(policy: Policy, rows: TrainingRows, way: str, checkpointing: bool) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step, by packed passes, by padded ones, or by the model's own logits row by row."""
    model = copy.deepcopy(policy.model)
    own = Policy(model, policy.tokenizer, policy.name)
    own.plain = way == "plain"
    trainer = Trainer(own, SFT(), OptimizerConfig(lr=1.0, gradient_checkpointing=checkpointing), 1)
    trainer.packs = way == "packed"
    loss = trainer.gradients(rows)["loss"]
    return loss, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", ["packed", "padded", "plain"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_own_routes_replayed_give_the_same_bits(kind: str, way: str, checkpointing: bool) -> None:
    policy = mixture(kind)
    rows = rows_of(policy)
    routed = rows.routed(own_routes(policy, rows))
    loss, wanted = gradients(policy, rows, way, checkpointing)
    again, given = gradients(policy, routed, way, checkpointing)
    assert again == loss
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_computed_again_takes_the_routes_of_its_forward_pass(kind: str) -> None:
    """Other routes give another loss, and checkpointing does not change its gradients."""
    policy = mixture(kind)
    rows = rows_of(policy)
    shape = route_shape(policy.model)
    assert shape
    others = {
        name: ((shape.read(data) + 1) % shape.experts).astype(shape.dtype).tobytes()
        for name, data in own_routes(policy, rows).items()
    }
    routed = rows.routed(others)
    loss, wanted = gradients(policy, routed, "packed", False)
    again, given = gradients(policy, routed, "packed", True)
    assert again == loss != gradients(policy, rows, "packed", False)[0]
    assert all(torch.equal(given[name], gradient) for name, gradient in wanted.items())


def rounded(policy: Policy, to: str) -> Policy:
    """A copy whose weights are rounded: to bfloat16, or those of matrices to 255 steps in each of their rows."""
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if to == "bfloat16":
                parameter.copy_(parameter.bfloat16())
            elif parameter.ndim > 1:
                step = parameter.abs().amax(-1, keepdim=True) / 127
                parameter.copy_((parameter / step).round() * step)
    return Policy(model, policy.tokenizer, policy.name)


@pytest.mark.parametrize(("kind", "to"), [(kind, to) for kind in FAMILIES for to in ("bfloat16", "int8")])
def test_replay_shrinks_the_distance_to_a_rounded_copy(kind: str, to: str) -> None:
    policy = mixture(kind, experts=16, layers=4)
    sampler = rounded(policy, to)
    rows = rows_of(policy, (120,) * 8)
    behaviour = np.concatenate(batch_logprobs(sampler, rows))
    own = np.concatenate(batch_logprobs(policy, rows))
    replayed = np.concatenate(batch_logprobs(policy, rows.routed(own_routes(sampler, rows))))
    assert abs(own - behaviour).max() > 3 * abs(replayed - behaviour).max() > 0


def test_rows_share_nodes_only_where_their_routes_are_equal() -> None:
    policy = mixture("qwen3-moe")
    rows = rows_of(policy)
    shape, routes = route_shape(policy.model), own_routes(policy, rows)
    assert shape
    changed = shape.read(routes["row-1"]).copy()
    changed[4] = (changed[4] + 1) % shape.experts
    other = rows.routed({**routes, "row-1": changed.tobytes()})
    alike = collate(rows.routed(routes), packing=True, shape=shape)
    differing = collate(other, packing=True, shape=shape)
    assert alike.packing
    assert differing.packing
    assert differing.routes
    nodes = [batch.packing.input_ids.shape[1] for batch in (alike, differing)]
    assert nodes == [17 + 30 + 24 - 2 * 9, 17 + 30 + 24 - 9 - 4]
    for number, name in enumerate(rows.ids()):
        length = len(rows.values("input_ids", number)) - 1
        seen = differing.routes.indices[differing.packing.places[number, :length]]
        assert seen.numpy().tobytes() == {**routes, "row-1": changed.tobytes()}[name]
        assert differing.routes.known[differing.packing.places[number, :length]].all()
    packed, padded = (gradients(policy, other, way, False) for way in ("packed", "padded"))
    assert packed[0] == pytest.approx(padded[0], rel=1e-6)
    for name, gradient in padded[1].items():
        torch.testing.assert_close(packed[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_tokens_without_routes_take_their_routers_own() -> None:
    policy = mixture("mixtral")
    rows = rows_of(policy)
    some = rows.routed({"row-1": own_routes(policy, rows, last=12)["row-1"]})
    shape = route_shape(policy.model)
    batch = collate(some, shape=shape)
    assert batch.routes
    assert batch.routes.known.sum() == 30 - 12
    assert gradients(policy, some, "packed", True)[0] == gradients(policy, rows, "packed", True)[0]


def test_routes_of_another_model_or_row_are_refused() -> None:
    policy = mixture("qwen3-moe")
    rows, shape = rows_of(policy), route_shape(policy.model)
    assert shape == RouteShape((0, 1), 2, 4)
    assert shape.token_bytes == 4
    for data, reason in [(b"123", "no whole tokens"), (b"\x04" * 8, "of another model"), (b"\0" * 80, "another row")]:
        with pytest.raises(TrainingError, match=reason):
            collate(rows.routed({"row-0": data}), shape=shape)
    routes = collate(rows.routed({}), shape=shape).routes
    with pytest.raises(ValueError, match="a pass of 5"), replaying(policy.model, routes):
        policy.model(input_ids=torch.arange(5)[None])
    assert "forward" not in vars(policy.model.model.layers[0].mlp.gate)


def test_a_dense_model_has_no_routes_and_the_first_layer_of_deepseek_none() -> None:
    from architectures import qwen

    assert route_shape(qwen().model) is None
    assert route_shape(mixture("deepseek-v3", layers=3).model) == RouteShape((1, 2), 2, 4)
    assert RouteShape((0,), 8, 257).dtype == np.uint16
