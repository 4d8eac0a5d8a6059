"""Pages that are made from the code: stages, choices, the pipeline file, the command, and the Python API.

Every setting has one anchor, the dotted path that it has in a pipeline file: ``reference/stages/train.sft`` has
``#optimizer.lr``. The page of a choice (``reference/choices/algorithm``) has ``#grpo.clip_high``.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import typer
from pydantic import BaseModel

import agentrl
from agentrl.flows import cli
from agentrl.flows.stages import described, yaml_of
from agentrl.pipelines.file.library import builtin_stages
from agentrl.schemas.annotations import markers
from agentrl.schemas.choice import RULE, OneOf, settings_class
from agentrl.schemas.pipeline import PipelineSpec

Pages = dict[str, str]
"""Markdown by path on the site."""


@dataclass(frozen=True)
class Row:
    """One setting."""

    key: str
    type: str
    default: str
    about: str
    choice: OneOf | None = None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this annotation may be, or that its elements are."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def rows(model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()) -> Iterator[Row]:
    """The settings of a model by dotted path, those of models inside it too."""
    schema = model.model_json_schema(by_alias=True)
    for name, info in model.model_fields.items():
        key = info.alias or name
        choice = next((mark for mark in markers(info) if isinstance(mark, OneOf)), None)
        field = schema["properties"][key]
        inside = [] if choice else [each for each in models_in(info.annotation) if each not in above]
        about = _described(model, name) or (" ".join((inside[0].__doc__ or "").split()) if inside else "")
        if not about and (choice or "const" in field):
            about = f"which {choice.kind}, with its settings" if choice else "its name"
        default = "required" if info.is_required() else _default(field.get("default"), bool(inside))
        yield Row(prefix + key, _type(field, choice, schema.get("$defs", {})), default, about, choice)
        for each in inside:
            yield from rows(each, f"{prefix}{key}.", (*above, model))


def _described(model: type[BaseModel], name: str) -> str:
    """The description of a field: that of the class, or of the nearest one above it, if it only changes the default."""
    fields = (above.model_fields.get(name) for above in model.__mro__ if issubclass(above, BaseModel))
    return next((field.description for field in fields if field and field.description), "")


def _default(value: Any, nested: bool) -> str:
    return "below" if nested and isinstance(value, dict) else json.dumps(value, ensure_ascii=False)


def _type(field: Mapping[str, Any], choice: OneOf | None, defs: Mapping[str, Any]) -> str:
    """What a value may be, in a few words, with its bounds."""
    if choice:
        return f"list of {choice.kind}s" if field.get("type") == "array" else choice.kind
    if "$ref" in field:
        target = defs[str(field["$ref"]).rpartition("/")[2]]
        return _type(target, None, defs) if "enum" in target else "mapping"
    if options := field.get("anyOf") or field.get("oneOf") or field.get("allOf"):
        return " or ".join(dict.fromkeys(_type(option, None, defs) for option in options))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum") or [field["const"]])
    if field.get("type") == "array":
        parts = field.get("prefixItems") or [field.get("items", {})]
        return f"list of {' and '.join(dict.fromkeys(_type(part, None, defs) for part in parts))}"
    names = {"object": "mapping", "string": "text"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    kind = str(field.get("type", "anything"))
    return " ".join([names.get(kind, kind), *([", ".join(bounds)] if bounds else [])])


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def slug(kind: str) -> str:
    return kind.replace(" ", "-")


def table(settings: Sequence[Row], choices: str, prefix: str = "") -> str:
    """A table of settings, each with its anchor. ``choices`` is the way from the page to the pages of choices."""
    lines = ["| setting | type | default | about |", "| --- | --- | --- | --- |"]
    seen: set[str] = set()
    for row in settings:
        anchor = prefix + row.key
        mark = "" if anchor in seen else f'<a id="{anchor}"></a>'
        seen.add(anchor)
        kind = f"[{row.type}]({choices}{slug(row.choice.kind)}.md)" if row.choice else row.type
        default = f"`{row.default}`" if row.default not in ("required", "below") else row.default
        lines.append(f"| {mark}`{row.key}` | {_cell(kind)} | {_cell(default)} | {_cell(row.about)} |")
    return "\n".join(lines) if settings else "It has no settings."


def prose(documentation: str | None) -> str:
    """A docstring as Markdown: its paragraphs, code in single backticks, roles of Sphinx without their names."""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", inspect.cleandoc(documentation or "").replace("``", "`"))


def stage_pages() -> tuple[Pages, dict[str, list[OneOf]]]:
    """A page for each stage of the library, an index of them, and the choices that their settings make."""
    pages: Pages = {}
    index = ["# Stages", "", "What `uses` of a stage in a [pipeline file](../pipeline-file.md) may name.", ""]
    index += ["| stage | reads | makes | about |", "| --- | --- | --- | --- |"]
    choices: dict[str, list[OneOf]] = {}
    for name, stage in sorted(builtin_stages().items()):
        about = described(name)
        settings = list(rows(stage.config))
        for row in settings:
            if row.choice:
                choices.setdefault(row.choice.kind, []).append(row.choice)
        needs = "".join(f"It needs the extra `{extra}`.\n\n" for extra in sorted(set(stage.requires.values())))
        ends = [
            f"{title}\n\n" + "".join(f"- `{key}`: {what}\n" for key, what in about[part].items())
            for title, part in (("## Inputs", "inputs"), ("## Outputs", "outputs"))
            if about[part]
        ]
        pages[f"reference/stages/{name}.md"] = "\n".join(
            [
                f"# {name}\n\n{prose(stage.function.__doc__)}\n\nVersion {stage.version}. {needs}\n",
                *ends,
                f"## Settings\n\nKeys of `with`.\n\n{table(settings, '../choices/')}\n",
                f"## Example\n\n```yaml\n{yaml_of(about['example'])}```\n",
            ]
        )
        first = prose(stage.function.__doc__).partition("\n\n")[0].partition(". ")[0]
        index.append(
            f"| [{name}]({name}.md) | {', '.join(stage.inputs)} | {', '.join(stage.outputs)} | {_cell(first)} |"
        )
    pages["reference/stages/index.md"] = "\n".join(index) + "\n"
    return pages, choices


def choice_pages(choices: Mapping[str, Sequence[OneOf]]) -> Pages:
    """A page for each kind of class that a setting chooses by name, and of the choices that those make in turn."""
    pages: Pages = {}
    ahead = {kind: list(marks) for kind, marks in choices.items()}
    while ahead:
        kind = next(iter(ahead))
        marks = ahead.pop(kind)
        ours = {name: mark for mark in marks for name in mark.ours}
        text = [f"# {kind.capitalize()}\n", f"Chosen by `{marks[0].key}`, or by its name alone: {RULE}"]
        text.append(f"({'; or '.join(dict.fromkeys(mark.rule for mark in marks))}).\n")
        for name, mark in sorted(ours.items()):
            choice = mark.find(name)
            model = choice if issubclass(choice, BaseModel) else settings_class(choice, kind)
            settings = [row for row in rows(model) if row.key != mark.key]
            text.append(f'\n<a id="{name}"></a>\n\n## {name}\n\n{prose(choice.__doc__)}\n\n')
            text.append(table(settings, "", f"{name}."))
            for row in settings:
                if (
                    row.choice
                    and f"reference/choices/{slug(row.choice.kind)}.md" not in pages
                    and row.choice.kind != kind
                ):
                    ahead.setdefault(row.choice.kind, []).append(row.choice)
        pages[f"reference/choices/{slug(kind)}.md"] = "\n".join(text) + "\n"
    index = ["# Choices\n", "Settings that choose a class by name:\n"]
    index += [f"- [{name.rpartition('/')[2][:-3]}]({name.rpartition('/')[2]})" for name in sorted(pages)]
    return pages | {"reference/choices/index.md": "\n".join(index) + "\n"}


def pipeline_page() -> str:
    """The keys of a pipeline file, from its schema."""
    text = "# The pipeline file\n\nEvery key, from the schema that reads it (`agentrl schema pipeline` prints it). "
    text += "[Pipelines](pipelines.md) explains them.\n\n"
    return text + table(list(rows(PipelineSpec)), "choices/") + "\n"


def _commands(group: Any, path: str = "agentrl") -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


def command_page() -> str:
    """Every command with its arguments and options."""
    text = ["# The command\n", "What `agentrl COMMAND --help` prints, for every command.\n"]
    for path, command in _commands(typer.main.get_command(cli.app)):
        text.append(f"## {path}\n\n{prose(command.help)}\n")
        lines = [_option(parameter) for parameter in command.params if not parameter.hidden]
        if lines:
            text.append("\n".join(["| | type | default | about |", "| --- | --- | --- | --- |", *lines]) + "\n")
    return "\n".join(text)


def _option(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name if name[0] == '-' else name.upper()}`" for name in names)
    kinds = {"bool": "flag", "str": "text", "int": "integer", "float": "number", "Path": "path"}
    matches = re.findall(r"\w+", str(getattr(parameter.type_descriptor, "annotation", "")).replace("<class", ""))
    kind = next((kinds[word] for word in reversed(matches) if word in kinds), "text")
    several = ", several" if parameter.multiple or parameter.nargs == -1 else ""
    value = parameter.default
    default = f"`{value}`" if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    given = "required" if parameter.required else default
    return f"| {shown} | {kind}{several} | {given} | {_cell(parameter.help or '')} |"


def _public() -> list[tuple[str, Any]]:
    return [(name, getattr(agentrl, name)) for name in agentrl.__all__ if name != "__version__"]


def api_page() -> str:
    """The public names for mkdocstrings, which renders their signatures and docstrings."""
    text = ["# The Python API\n", "What `import agentrl` gives. [From Python](../how-to/python.md) shows it at work.\n"]
    text += [
        f"::: {value.__module__}.{value.__qualname__}\n    options: {{heading: {name}}}\n" for name, value in _public()
    ]
    return "\n".join(text)


def api_twin() -> str:
    """The same as plain Markdown."""
    text = ["# The Python API\n", "What `import agentrl` gives.\n"]
    for name, value in _public():
        text.append(f"## agentrl.{name}\n\n{_code(name, value)}\n\n{prose(value.__doc__)}\n")
        if isinstance(value, type):
            for member, function in vars(value).items():
                target = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
                if member[0] != "_" and inspect.isfunction(target) and target.__doc__:
                    text.append(f"### {name}.{member}\n\n{_code(member, target)}\n\n{prose(target.__doc__)}\n")
    return "\n".join(text)


def _code(name: str, value: Any) -> str:
    try:
        return f"```python\n{name}{inspect.signature(value)}\n```"
    except (TypeError, ValueError):
        return f"```python\n{name}\n```"


def generated() -> Pages:
    """Every page of the reference that is made from the code."""
    pages, choices = stage_pages()
    return {
        **pages,
        **choice_pages(choices),
        "reference/pipeline-file.md": pipeline_page(),
        "reference/command.md": command_page(),
        "reference/api.md": api_page(),
    }
