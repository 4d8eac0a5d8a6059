"""Arrow schemas derived from pydantic models, so that each table has one definition.

A field's Arrow type follows from its annotation; ``Annotated[int, pa.int32()]`` overrides the
default width. A field is nullable if its annotation admits ``None``.
"""

import types
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import pyarrow as pa
from pydantic import AfterValidator, BaseModel

from agentrl.schemas.json_text import is_json, loads

Row = TypeVar("Row", bound=BaseModel)

VERSION_KEY = b"agentrl.schema_version"


def _check_json(text: str) -> str:
    if is_json(text):
        return text
    try:
        loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON ({str(error)[:200]}); write it with json.dumps") from None
    return text


Json = Annotated[str, AfterValidator(_check_json), "json"]
"""Text that holds JSON: schemas of tools and of their arguments differ from row to row, so they are not structs."""

Int32 = Annotated[int, pa.int32()]
Float32 = Annotated[float, pa.float32()]

_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
}


def _arrow_type(annotation: Any) -> tuple[pa.DataType, bool]:
    """Arrow type and nullability of one annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *extras = get_args(annotation)
        explicit = [extra for extra in extras if isinstance(extra, pa.DataType)]
        return (explicit[0], False) if explicit else _arrow_type(base)
    if origin in (Union, types.UnionType):
        [inner] = [arg for arg in get_args(annotation) if arg is not type(None)]
        return _arrow_type(inner)[0], True
    if origin is list:
        [inner] = get_args(annotation)
        value_type, nullable = _arrow_type(inner)
        return pa.list_(pa.field("element", value_type, nullable=nullable)), False
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return pa.struct(_fields(annotation)), False
        if issubclass(annotation, StrEnum):
            return pa.string(), False
        if annotation in _SCALARS:
            return _SCALARS[annotation], False
    raise TypeError(f"no Arrow type for annotation {annotation!r}; annotate it as Annotated[..., pa.<type>()]")


def _fields(model: type[BaseModel]) -> list[pa.Field]:
    fields = []
    for name, info in model.model_fields.items():
        annotation: Any = info.annotation
        if info.metadata:
            annotation = Annotated[(annotation, *info.metadata)]
        arrow_type, nullable = _arrow_type(annotation)
        fields.append(pa.field(name, arrow_type, nullable=nullable))
    return fields


def arrow_schema(model: type[BaseModel], version: int) -> pa.Schema:
    """The Arrow schema of one model, fields in their order of definition, with its version in the metadata."""
    return pa.schema(_fields(model), metadata={VERSION_KEY: str(version).encode()})


def json_columns(model: type[BaseModel]) -> list[str]:
    """Names of the top-level columns that hold JSON text."""
    return [name for name, info in model.model_fields.items() if "json" in info.metadata]


def to_table(rows: Iterable[BaseModel], schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table with exactly ``schema``."""
    return pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema)


def from_table(model: type[Row], table: pa.Table) -> Sequence[Row]:
    """Validated rows of a table; columns that the table lacks take the model's defaults."""
    return [model.model_validate(row) for row in table.to_pylist()]
