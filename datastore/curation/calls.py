"""Whether tool calls are valid: their arguments are an object, which fits the schema that the row declares for the
tool, as JSON Schema defines it."""

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import polars as pl
from jsonschema import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for
from referencing.jsonschema import EMPTY_REGISTRY


class Verdict(enum.IntEnum):
    """What is known of the calls of a row; the highest of its calls counts."""

    VALID = 0
    UNDECLARED = 1
    """A tool is called that the row does not declare."""
    UNUSABLE = 2
    """A tool is called whose schema cannot be used."""
    INVALID = 3
    """Arguments are no object, or do not fit the schema."""


class UnusableSchemaError(ValueError):
    """The schema of a tool is no JSON Schema, or refers to what is not in it."""


class Declared:
    """Judges calls by the schemas of tools. ``problem`` says why a schema could not be used: the first that was met."""

    def __init__(self) -> None:
        self.problem = ""
        self._schemas = lru_cache(maxsize=128)(_schemas)  # rows share their tools
        self._validator = lru_cache(maxsize=1024)(_validator)

    def verdict(self, messages: Sequence[Mapping[str, Any]], tools: str) -> Verdict:
        """Of the calls in ``messages`` by the ``tools`` of the row, JSON."""
        calls = [call for message in messages for call in message["tool_calls"]]
        return max((self._judged(call["name"], call["arguments"], tools) for call in calls), default=Verdict.VALID)

    def _judged(self, name: str, arguments: str, tools: str) -> Verdict:
        given = json.loads(arguments)
        if not isinstance(given, dict):
            return Verdict.INVALID
        schemas = self._schemas(tools)
        if name not in schemas:
            return Verdict.UNDECLARED
        try:
            return Verdict.VALID if self._fits(schemas[name], given) else Verdict.INVALID
        except UnusableSchemaError as error:
            self.problem = self.problem or f"{name}: {error}"
            return Verdict.UNUSABLE

    def _fits(self, schema: str, given: dict[str, Any]) -> bool:
        validator = self._validator(schema)
        if isinstance(validator, UnusableSchemaError):
            raise validator
        try:
            return bool(validator.is_valid(given))
        except (
            Exception
        ) as error:  # a schema of others', to which no list of errors is known: it refers to nothing, or to itself
            raise UnusableSchemaError(f"{type(error).__name__}: {str(error)[:200]}") from None


def _schemas(tools: str) -> dict[str, str]:
    """The schema of the arguments of each tool, JSON, by the tool's name: in OpenAI's form, or bare as Anthropic's and
    MCP's."""
    declared = json.loads(tools)
    schemas = {}
    for tool in declared if isinstance(declared, list) else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            given = (function.get(key) for key in ("parameters", "input_schema", "inputSchema"))
            schemas[function["name"]] = json.dumps(next((schema for schema in given if schema is not None), {}))
    return schemas


def _validator(schema: str) -> Validator | UnusableSchemaError:
    """What checks arguments. Nothing is fetched that a schema refers to, and no pattern takes for ever."""
    parsed = json.loads(schema)
    try:
        kind = validator_for(parsed, default=Draft202012Validator)
        kind.check_schema(parsed)
        if _has_key(parsed, "patternProperties"):  # which jsonschema matches in several places, by backtracking
            raise UnusableSchemaError("patternProperties are not supported")
        return extend(kind, {"pattern": _pattern})(parsed, registry=EMPTY_REGISTRY)
    except SchemaError as error:
        return UnusableSchemaError(f"{'.'.join(map(str, error.absolute_path)) or 'schema'}: {error.message[:200]}")
    except UnusableSchemaError as error:
        return error
    except Exception as error:  # as above
        return UnusableSchemaError(f"{type(error).__name__}: {str(error)[:200]}")


def _pattern(_: Validator, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    """Match in time that is linear in the text, as Rust's expressions do: those of Python may take for ever, and
    schemas are of others. Raises if Rust has no such pattern, as with look-ahead."""
    if isinstance(text, str) and not pl.Series([text]).str.contains(pattern)[0]:
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _has_key(value: Any, key: str) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and key in value) or any(_has_key(element, key) for element in inner)
