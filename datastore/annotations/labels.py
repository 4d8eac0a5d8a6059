"""The labels that people may give: thumbs, stars, and those of a schema in YAML."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.schemas.annotation import STARS, THUMBS

MOST_VALUES = 9
"""Each value has a key, 1 to 9."""


def _distinct(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError(f"names something twice: {', '.join(values)}")
    return values


def _named_once(labels: "list[Label]") -> "list[Label]":
    _distinct([label.name for label in labels])
    return labels


Value = Annotated[str, Field(min_length=1, max_length=80)]


class Label(BaseModel):
    """A name, and the values of which an author gives one."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    name: str = Field(min_length=1, max_length=80)
    values: Annotated[list[Value], Field(min_length=2, max_length=MOST_VALUES), AfterValidator(_distinct)]
    description: str = ""


EVERYWHERE = (
    Label(name=THUMBS, values=["up", "down"], description="good or bad"),
    Label(name=STARS, values=["1", "2", "3", "4", "5"], description="from bad to good"),
)
"""Labels without any schema."""


class LabelSchema(BaseModel):
    """``labels`` of one's own, which come after thumbs and stars."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: Annotated[list[Label], AfterValidator(_named_once)] = []

    @property
    def every(self) -> list[Label]:
        """All labels. One of the schema takes the place of thumbs or stars if it has the name."""
        own = {label.name for label in self.labels}
        return [*(label for label in EVERYWHERE if label.name not in own), *self.labels]
