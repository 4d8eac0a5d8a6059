"""Config fields that choose a class by name: one of ours, or ``module:Class`` of the user's own.

    algorithm: Annotated[Any, OneOf("algorithm", {"grpo": "agentrl.algorithms.grpo:GRPO"}, PolicyGradient)]

In a pipeline file the value is a mapping, ``{type: my_algorithms:Mine, scale: 2}``: ``type`` names the class, and the
other keys are its settings. A name alone is the class with the defaults of its settings. The name is looked up, the
class is compared with its base, and the settings are checked when the config is read.

After that the field holds the object itself, if the base is a pydantic model: the user's class is derived from it, and
its fields are the settings. If the base is a protocol, the field holds :class:`Settings`, of which the object is made
when it is needed; the parameters of ``__init__`` are the settings.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema, to_jsonable_python

from agentrl.schemas.annotations import is_secret, unknown_key
from agentrl.schemas.declared import Declares, declared, is_class
from agentrl.schemas.hints import did_you_mean

RULE = "one of your own: module:Class, beside the pipeline file or installed"


class Settings(BaseModel):
    """The name of a class and the settings to make an object of it with. Each class has its own class of settings,
    whose fields are the parameters of the class (:func:`settings_class`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kind: ClassVar[str] = ""
    implementation: ClassVar[type[Any]]
    as_one: ClassVar[type[BaseModel] | None] = None
    """The class of the only parameter, ``config``, if the settings are its fields."""

    type: str

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}

    def __str__(self) -> str:
        """The name, and the settings that differ from their defaults as a JSON object with sorted keys."""
        given = {name: value for name, value in _different(self).items() if name != "type"}
        return self.type + (json.dumps(given, sort_keys=True, ensure_ascii=False) if given else "")

    def make(self) -> Any:
        values = self.values()
        return self.implementation(self.as_one(**values)) if self.as_one else self.implementation(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self).kind, self.implementation, self.type, self.values())


def _different(value: Any) -> Any:
    """What differs from its default, in JSON's types. The ``type`` of a model stays, since it may say which model it
    is."""
    if isinstance(value, BaseModel):
        fields = ((name, info, getattr(value, name)) for name, info in type(value).model_fields.items())
        return {
            name: _different(setting)
            for name, info, setting in fields
            if name == "type" or setting != info.get_default(call_default_factory=True)
        }
    if isinstance(value, Mapping):
        return {str(name): _different(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_different(element) for element in value]
    return to_jsonable_python(value)


def plain(text: str) -> str:
    """A name without the settings that the text of :class:`Settings` has."""
    return text.partition("{")[0]


def _remade(kind: str, implementation: type[Any], name: str, values: dict[str, Any]) -> Settings:
    return settings_class(implementation, kind)(type=name, **values)


_SETTINGS: dict[Any, type[Settings]] = {}


def settings_class(implementation: type[Any], kind: str) -> type[Settings]:
    """The settings of a class: the parameters of ``__init__`` with their types, or the fields of the pydantic model
    that it is, or that its only parameter ``config`` takes.

    Raises LookupError if a parameter cannot be a setting.
    """
    if (implementation, kind) in _SETTINGS:
        return _SETTINGS[implementation, kind]
    fields: dict[str, Any] = {}
    as_one = None
    if not issubclass(implementation, BaseModel) and implementation.__init__ is not object.__init__:
        fields = _parameters(implementation)
        only = fields["config"][0] if list(fields) == ["config"] else None
        as_one = only if isinstance(only, type) and issubclass(only, BaseModel) else None
    if model := as_one or (implementation if issubclass(implementation, BaseModel) else None):
        fields = {name: (info.annotation, info) for name, info in model.model_fields.items()}
    if "type" in fields:
        raise LookupError(f"{implementation.__name__} has a setting 'type', which names the class; rename it")
    made = create_model(f"SettingsOf{implementation.__name__}", __base__=Settings, __module__=__name__, **fields)
    made.kind, made.implementation, made.as_one = kind, implementation, as_one
    return _SETTINGS.setdefault((implementation, kind), made)


def _parameters(implementation: type[Any]) -> dict[str, Any]:
    _self, *parameters = inspect.signature(implementation.__init__).parameters.values()
    try:
        hints = get_type_hints(implementation.__init__, include_extras=True)
    except NameError as error:
        raise LookupError(f"{implementation.__name__}.__init__: {error}; import what its annotations name") from None
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise LookupError(
                f"{implementation.__name__}.__init__ takes {parameter}; a setting is a parameter with a name and a type"
            )
    return {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
    }


@dataclass(frozen=True)
class OneOf:
    """Marks a config field that holds an object of a class chosen by name, or the :class:`Settings` of one.

    ``ours`` maps each name to ``module:Class``. A class of the user's has the methods of ``base``, callable in the same
    way. ``declares`` recognises the declaration of such a class in a source that nobody has imported yet.
    """

    kind: str
    ours: Mapping[str, str]
    base: type[Any]
    key: str = "type"
    declares: Declares = field(default=is_class)
    own: tuple[type[Any], ...] = ()
    """The bases that a class of the user's may be derived from; by default ``base`` alone."""

    def __hash__(self) -> int:
        return hash((self.kind, self.base, self.key))

    @property
    def rule(self) -> str:
        """How a class of the user's is written, for messages."""
        bases = self.own or (self.base,)
        if all(issubclass(base, BaseModel) for base in bases):
            return f"a class derived from {' or '.join(f'{base.__module__}.{base.__name__}' for base in bases)}"
        return f"a class with the methods {', or '.join(' and '.join(_methods(base)) for base in bases)}"

    def find(self, name: str) -> type[Any]:
        """The class of that name. Raises LookupError with a message for the user."""
        if ":" not in name:
            if name in self.ours:
                return _load(self.ours[name])
            ours = [f"ours: {', '.join(sorted(self.ours))}"] if self.ours else []
            hint = did_you_mean(name, self.ours)
            raise LookupError(f"there is no {self.kind} {name!r}{hint}; {'; '.join([*ours, RULE])}")
        value = declared(name, self.kind, self.declares, self.rule)
        bases = self.own or (self.base,)
        if not isinstance(value, type) or not any(
            not issubclass(base, BaseModel) or issubclass(value, base) for base in bases
        ):
            raise LookupError(f"{name!r} is no {self.kind}: {self.rule}")
        problems = [misfit(value, base) for base in bases]
        if all(problems):
            raise LookupError(f"{name!r} is no {self.kind}: {problems[0]}")
        return value

    def read(self, value: Any) -> Any:
        """The object that a value of a config stands for, or its settings. Raises pydantic's ValidationError with all
        that is wrong."""
        if isinstance(value, Settings if self._by_settings else self.base):
            return value
        given = self._spelled(value) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise PydanticCustomError("choice", f"give the name of one {self.kind}, or a mapping with {self.key!r}")
        name = given.get(self.key)
        at: tuple[int | str, ...] = () if isinstance(value, str) else (self.key,)
        if not isinstance(name, str):
            lack = "is missing; it names" if name is None else "names"
            raise _invalid([_line("choice", f"{lack} the {self.kind}: {self._names()}; {RULE}", at, name)])
        try:
            implementation = self.find(name)
            model: type[BaseModel] = settings_class(implementation, self.kind) if self._by_settings else implementation
        except LookupError as error:
            raise _invalid([_line("unknown_name", str(error.args[0]), at, name)]) from None
        rest = {key: setting for key, setting in given.items() if key != self.key}
        try:
            model_name = name if self._by_settings else _accepted(model, self.key, name)
            made = model.model_validate(rest | {self.key: model_name})
        except ValidationError as error:
            raise _invalid([_better(problem, model) for problem in error.errors(include_url=False)]) from None
        return made.model_copy(update={self.key: name})  # also if it inherits the name of one of ours

    def _spelled(self, text: str) -> Mapping[str, Any]:
        """A name alone, or what :class:`Settings` give as text."""
        name, brace, rest = text.partition("{")
        if not brace or not self._by_settings:
            return {self.key: text}
        try:
            return {**json.loads(brace + rest), self.key: name}
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("choice", f"{text!r}: its settings are no JSON: {error}") from None

    @property
    def _by_settings(self) -> bool:
        return not issubclass(self.base, BaseModel)

    def _names(self) -> str:
        return ", ".join(sorted(self.ours)) or "none of ours"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.read, json_schema_input_schema=handler.generate_schema(self._shape())
        )

    def _shape(self) -> Any:
        """The type that the JSON Schema describes."""
        about, title = f"module:Class, {self.rule}", self.kind.title().replace(" ", "")
        if self._by_settings:
            name = Field(description=f"{self._names()}; or {about}")
        else:
            name, title = Field(pattern=":", description=about), f"Own{title}"
        fields: dict[str, Any] = {self.key: (Annotated[str, name], ...)}
        own = create_model(title, __config__=ConfigDict(extra="allow"), **fields)
        if self._by_settings or not self.ours:
            return own | str
        ours = reduce(or_, [_load(path) for path in self.ours.values()])
        return Annotated[ours, Field(discriminator=self.key)] | own | str


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def _accepted(model: type[BaseModel], key: str, name: str) -> str:
    """What the field of the name accepts: a class that is derived from one of ours may accept only its name."""
    annotation = model.model_fields[key].annotation
    return str(get_args(annotation)[0]) if get_origin(annotation) is Literal else name


def _methods(base: type[Any]) -> dict[str, Callable[..., Any]]:
    """Public methods that a class declares, and those of the classes of ours that it is derived from."""
    by_name: dict[str, Callable[..., Any]] = {}
    for cls in base.__mro__:
        if cls.__module__.partition(".")[0] not in ("pydantic", "builtins", "typing", "abc"):
            methods = {
                name: function
                for name, function in vars(cls).items()
                if inspect.isfunction(function) and name[0] != "_"
            }
            by_name = methods | by_name
    return by_name


def misfit(implementation: type[Any], base: type[Any]) -> str:
    """Why a class cannot stand for ``base``: a method is missing, or cannot be called like that of ``base``. The empty
    text if it can."""
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    protocol = not issubclass(base, BaseModel)
    for name, ours in _methods(base).items():
        method = getattr(implementation, name, None)
        wanted = _called(name, ours)
        if method is None or (method is ours and (protocol or name in abstract)):
            return f"it lacks {wanted}"
        if not callable(method):
            return f"its {name} is no method; wanted: {wanted}"
        if method is not ours or protocol:
            try:
                inspect.signature(method).bind(*_placeholders(ours))
            except TypeError as error:
                return f"{_called(name, method)} must be callable as {wanted}: {error}"
            except ValueError:  # a method without a signature, of a C extension
                continue
    return ""


def _called(name: str, function: Callable[..., Any]) -> str:
    """A method with the names of its parameters."""
    names = (
        str(parameter.replace(annotation=parameter.empty))
        for parameter in inspect.signature(function).parameters.values()
    )
    return f"{name}({', '.join(names)})"


def _placeholders(function: Callable[..., Any]) -> Iterator[None]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield None


def _better(error: Any, model: type[BaseModel]) -> InitErrorDetails:
    """An error of a class's settings: unknown keys with a suggestion, secrets without their value."""
    location, message = error["loc"], error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return _line("unknown_key", unknown_key(model, location), location, {})
    shown = {} if is_secret(model, location) else error["input"]
    return _line("missing" if error["type"] == "missing" else "setting", message, location, shown)


def _line(kind: Any, message: str, location: Sequence[int | str], value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(kind, message), loc=tuple(location), input=value)


def _invalid(lines: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("choice", lines)
