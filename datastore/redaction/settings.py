"""What counts as a secret: the settings of redaction, as pipeline files and commands have them."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Detector = Literal["keys", "passwords", "private_keys", "mail", "phone", "hosts", "users"]
OnTokens = Literal["rewrite", "drop"]
"""What happens to the tokens of a row with secrets."""
DETECTORS: tuple[Detector, ...] = ("keys", "passwords", "private_keys", "mail", "phone", "hosts", "users")


def _compiles(expression: str) -> str:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if pattern.match(""):
        raise ValueError("matches the empty text, which stands everywhere; write a pattern that needs a character")
    return expression


def _kind(name: str) -> str:
    if not re.fullmatch(r"[A-Z][A-Z0-9_]{0,40}", name):
        raise ValueError("a kind is written as in EMPLOYEE_ID: capital letters, digits and underscores")
    return name


Expression = Annotated[str, AfterValidator(_compiles)]


class Redaction(BaseModel):
    """What is replaced, and what is left as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect: list[Detector] = Field(
        list(DETECTORS),
        description="what is looked for: keys (of services), passwords, private_keys, mail, phone, hosts, users",
    )
    patterns: dict[Annotated[str, AfterValidator(_kind)], Expression] = Field(
        {},
        description="regular expressions of your own by kind, as in EMPLOYEE_ID: 'E-[0-9]{6}'; a group (?P<s>...) "
        "in it is the secret alone",
    )
    keep: list[Expression] = Field(
        [], description="regular expressions of values that are no secrets: a value that one matches as a whole stays"
    )
    regions: list[str] = Field(
        ["US", "GB"],
        description="countries whose phone numbers are found as they are written there, as in US; "
        "numbers that begin with + are found of every country",
    )

    def of(self, detector: Detector) -> bool:
        return detector in self.detect


EVERYTHING = Redaction()
