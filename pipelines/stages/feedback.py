"""Stages that read what people and judges say of rows and pairs: scores for training, pairs in which a correction is
preferred to what it corrects, and pairs as those who compared their sides prefer them."""

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from agentrl.pipelines.handles import Model, Pairs, Scores, Trajectories
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.distinct import weights_of
from agentrl.pipelines.parts.pairing import SideOfPair, pair_of, tokenised
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.corrections import corrected_row
from agentrl.schemas.annotation import CORRECTION, PREFERENCE, THUMBS
from agentrl.schemas.arrow import to_table
from agentrl.schemas.json_text import loads
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, Trajectory

if TYPE_CHECKING:
    import polars as pl

    from agentrl.chat.codec import ChatCodec


class FeedbackConfig(StageConfig):
    annotations: int = Field(
        ge=0, description="version of the table of annotations, as `agentrl buffer annotate` prints it"
    )
    author_kind: Literal["person", "judge"] | None = Field(
        None, description="whose annotations count; null: people's and judges'"
    )


class RatedConfig(FeedbackConfig):
    name: str = Field(THUMBS, description="of the annotations: thumbs, stars, or a label of one's own")
    low: float = Field(0.0, description="number that is the reward 0, as 1 of stars")
    high: float = Field(1.0, description="number that is the reward 1, as 5 of stars")
    scorer: str | None = Field(None, description="what stages that read the scores call them; null: the name")

    @model_validator(mode="after")
    def _ordered(self) -> "RatedConfig":
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class Rated(NamedTuple):
    scores: Scores
    trajectories: Trajectories


@stage("scores.from_feedback", version=1)
def scores_from_feedback(context: Context, config: RatedConfig, trajectories: list[Trajectories]) -> Rated:
    """Rewards that people and judges gave: the mean over the authors of a row of what they say under ``name``, put on
    the scale from ``low`` to ``high``. A row succeeds if its reward is above one half, and fails below it; if it is
    exactly that, or if nobody says anything, neither is known, and ``why`` says so. ``trajectories`` are the rows of
    which it is known, with their weights, as `train.kto` takes them beside the scores. Annotations of single turns do
    not count here.

    Raises ValueError that names an annotation whose number is beyond the scale.
    """
    from agentrl.datastore.curation.annotated import said_of_rows

    weights = weights_of(trajectories)
    given = said_of_rows(context.buffer.annotations.frame(config.annotations), config.name, config.author_kind)
    given = given.filter(given["trajectory_id"].is_in(list(weights)))
    numbers = given.filter(given["number"].is_not_null())
    beyond = numbers.filter((numbers["number"] < config.low) | (numbers["number"] > config.high))
    if beyond.height:
        row = beyond.row(0, named=True)
        raise ValueError(
            f"{row['author']} says {config.name} {row['value']} of {row['trajectory_id']}, beyond {config.low:g} to "
            f"{config.high:g}; set low and high to the ends of the scale"
        )
    rewards: dict[str, list[float]] = {name: [] for name in weights}
    for name, number in zip(numbers["trajectory_id"], numbers["number"], strict=True):
        rewards[name].append((number - config.low) / (config.high - config.low))
    scorer = config.scorer or config.name
    scores = [_score(name, scorer, config.name, of_row) for name, of_row in rewards.items()]
    known = [score.trajectory_id for score in scores if score.success is not None]
    context.metrics.update(
        rows=len(scores),
        rated=sum(score.reward is not None for score in scores),
        undecided=sum(score.reward is not None and score.success is None for score in scores),
        annotations=numbers.height,
        authors=numbers["author"].n_unique(),
        without_number=given.height - numbers.height,
    )
    table = to_table(scores, SCORE_SCHEMA)
    return Rated(context.scores(table), context.select(known, [weights[name] for name in known]))


def _score(row: str, scorer: str, name: str, rewards: list[float]) -> TrajectoryScore:
    fields: dict[str, Any] = {"trajectory_id": row, "scorer": scorer}
    if not rewards:
        return TrajectoryScore(**fields, reward=None, success=None, why=f"nobody says {name} of it")
    reward = sum(rewards) / len(rewards)
    components = [RewardComponent(name=name, value=reward)]
    if reward == 0.5:
        why = f"the {len(rewards)} authors are undecided"
        return TrajectoryScore(**fields, reward=reward, success=None, components=components, why=why)
    return TrajectoryScore(**fields, reward=reward, success=reward > 0.5, components=components)


class CorrectionsConfig(FeedbackConfig):
    name: str = Field(CORRECTION, description="of the annotations whose corrections count")


class Corrected(NamedTuple):
    pairs: Pairs
    trajectories: Trajectories


@stage("pairs.from_feedback", version=1)
def pairs_from_feedback(
    context: Context, config: CorrectionsConfig, trajectories: list[Trajectories], model: Model
) -> Corrected:
    """Preference pairs from corrections: what a person or a judge says should have been there is preferred to the turn
    that it corrects, after exactly the same tokens. The loss covers that turn alone. ``trajectories`` are the corrected
    rows, which end with the correction and are trained on it alone, for `train.sft`. ``model`` says how a turn is
    written. Each author's newest correction of a turn gives a pair; one without a turn is of the last.

    Corrections of turns that the policy did not sample, or whose tokens the row does not name, and those that say the
    same as the turn, are left out and counted. Rows of other splits than train are refused.

    Raises ValueError if rows are of another tokenizer than the model's.
    """
    from agentrl.datastore.curation.annotated import said
    from agentrl.models.policy import Tokenizing

    weights = weights_of(trajectories)
    rows = {row.trajectory_id: row for row in tokenised(context, trajectories, model)}
    speaker = Tokenizing(model.path, model.name)
    given = said(context.buffer.annotations.frame(config.annotations), config.name, config.author_kind)
    given = given.filter(given["correction"].is_not_null() & given["trajectory_id"].is_in(list(rows)))
    pairs, made, dropped = _pairs(context, rows, given, speaker.codec, speaker.tokenizer_fingerprint)
    if made and not context.has_shard(0):
        context.append(made, 0)
    context.metrics.update(
        corrections=given.height, pairs=len(pairs), rows=len(rows), authors=given["author"].n_unique()
    )
    count(context, {"not_sampled": 0, "no_tokens": 0, "same": 0, **dropped})
    weighted = [pair.model_copy(update={"weight": weights[pair.rejected_id]}) for pair in pairs]
    return Corrected(context.pairs(weighted), context.select([row.trajectory_id for row in made]))


def _pairs(
    context: Context, rows: dict[str, Trajectory], corrections: "pl.DataFrame", codec: "ChatCodec", tokenizer: str
) -> tuple[list[Pair], list[Trajectory], Counter[str]]:
    """Pairs of corrections and the turns that they correct, the corrected rows, and why others gave none."""
    pairs: list[Pair] = []
    made: list[Trajectory] = []
    dropped: Counter[str] = Counter()
    for correction in corrections.sort("trajectory_id", "turn", "author", nulls_last=True).to_dicts():
        row = rows[correction["trajectory_id"]]
        if row.tokenizer != tokenizer:
            raise ValueError(
                f"{row.trajectory_id} is of the tokenizer {row.tokenizer}, and inputs.model of {tokenizer}; wire the "
                "model that sampled it, or one with the same tokenizer and chat template"
            )
        assistants = [number for number, message in enumerate(row.messages) if message.role is Role.ASSISTANT]
        number = assistants[-1 if correction["turn"] is None else correction["turn"]]
        turn = row.messages[number]
        start, end = turn.token_start, turn.token_end
        if start is None or end is None or start >= end:
            dropped["no_tokens"] += 1
            continue
        if not any(row.action_mask[start:end]):
            dropped["not_sampled"] += 1
            continue
        message = Message.model_validate(loads(correction["correction"]))
        ids = codec.assistant(message)
        if ids == row.input_ids[start:end]:
            dropped["same"] += 1
            continue
        corrected = _corrected(context.trajectory_id(len(made)), row, number, message, ids, correction["author"])
        made.append(corrected)
        sides = SideOfPair(corrected, start, len(corrected.input_ids)), SideOfPair(row, start, end)
        pairs.append(pair_of(len(pairs), PairKind.STEP, *sides, (1.0, 0.0), "feedback"))
    return pairs, made, dropped


def _corrected(name: str, row: Trajectory, number: int, message: Message, ids: list[int], author: str) -> Trajectory:
    """The row up to a message, with the correction in its place. Nobody acted on it, so it has no outcome."""
    start = row.messages[number].token_start or 0
    whole = row.input_ids[:start] + ids
    turn = message.model_copy(update={"token_start": start, "token_end": len(whole)})
    return corrected_row(
        row,
        name,
        whole,
        [False] * start + [True] * len(ids),
        group_id=name,
        fork_at=start,
        env_version=row.env_version,
        policy=author,
        reward=None,
        success=None,
        termination=Termination.CANCELLED,
        n_steps=1,
        n_tool_calls=len(message.tool_calls),
        messages=[*row.messages[:number], turn],
    )


class PreferencesConfig(FeedbackConfig):
    name: str = Field(PREFERENCE, description="of the annotations: of pairs, with the value chosen, rejected or tie")
    unjudged: Literal["drop", "keep"] = Field("drop", description="what becomes of pairs of which nobody says anything")


@stage("pairs.from_preferences", version=1)
def pairs_from_preferences(context: Context, config: PreferencesConfig, pairs: list[Pairs]) -> Pairs:
    """Pairs of other stages, as people and judges prefer their sides. The side that more authors prefer is the chosen
    one, so that some pairs are swapped, rewards and masks with them; if as many prefer the other one, or all call it a
    tie, the pair is left out. ``agreement`` is the share of preferences that are for the side that the stage before
    chose.

    Raises ValueError that names an annotation with another value than chosen, rejected and tie.
    """
    votes = _votes(context.buffer.annotations.frame(config.annotations), config)
    kept: list[Pair] = []
    counts: Counter[str] = Counter()
    agreeing = preferences = 0
    for pair in (pair for handle in pairs for pair in handle.read()):
        side = Counter(votes.get((pair.pair_id, pair.chosen_id), {}))
        for value, number in votes.get((pair.pair_id, pair.rejected_id), {}).items():  # said when it was the chosen one
            side[{"chosen": "rejected", "rejected": "chosen"}.get(value, value)] += number
        agreeing, preferences = agreeing + side["chosen"], preferences + side["chosen"] + side["rejected"]
        if not side:
            counts["unjudged"] += 1
            kept += [pair] if config.unjudged == "keep" else []
        elif side["chosen"] == side["rejected"]:
            counts["undecided"] += 1
        else:
            better = side["chosen"] > side["rejected"]
            counts["confirmed" if better else "swapped"] += 1
            kept.append(pair if better else swapped(pair))
    context.metrics["pairs"] = len(kept)
    if preferences:
        context.metrics["agreement"] = agreeing / preferences
    count(context, {"confirmed": 0, "swapped": 0, "undecided": 0, "unjudged": 0, **counts})
    return context.pairs(kept)


def _votes(annotations: "pl.DataFrame", config: PreferencesConfig) -> dict[tuple[str, str], Counter[str]]:
    """How many authors say each value, by the id of the pair and of the row that was its chosen side then."""
    from agentrl.datastore.curation.annotated import said

    given = said(annotations, config.name, config.author_kind)
    given = given.filter(given["pair_id"].is_not_null() & given["value"].is_not_null())
    votes: dict[tuple[str, str], Counter[str]] = {}
    for preference in given.to_dicts():
        if preference["value"] not in ("chosen", "rejected", "tie"):
            raise ValueError(
                f"{preference['author']} says {config.name} {preference['value']} of the pair {preference['pair_id']}; "
                "allowed are chosen, rejected and tie: set name to the annotations that say these, or correct this one"
            )
        votes.setdefault((preference["pair_id"], preference["trajectory_id"]), Counter())[preference["value"]] += 1
    return votes


def swapped(pair: Pair) -> Pair:
    """The pair with its sides the other way round."""
    sides = {"chosen": "rejected", "rejected": "chosen"}
    fields = ("id", "reward", "ids", "mask")
    return pair.model_copy(
        update={f"{a}_{name}": getattr(pair, f"{b}_{name}") for a, b in sides.items() for name in fields}
    )
