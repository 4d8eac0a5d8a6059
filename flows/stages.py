"""Descriptions of the stages of the library: inputs, outputs, config, and an example."""

from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.pipelines.file import library
from agentrl.pipelines.file.document import library_files, parse
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.stage import Stage


def listed() -> list[dict[str, Any]]:
    """Every stage of the library: name, what it reads and makes, its first sentence."""
    return [
        {
            "stage": stage.name,
            "inputs": _inputs(stage),
            "outputs": _outputs(stage),
            "about": _about(stage).partition(". ")[0],
        }
        for _, stage in sorted(library.builtin_stages().items())
    ]


def described(name: str) -> dict[str, Any]:
    """One stage with its config fields and an example. Raises LookupError if there is none of that name."""
    stage = library.resolve(name)
    schema = stage.config.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    fields = [
        {
            "field": field,
            "type": _type(value),
            "default": "required" if field in required else value.get("default"),
            "about": value.get("description", ""),
        }
        for field, value in schema.get("properties", {}).items()
    ]
    return {
        "stage": stage.name,
        "version": stage.version,
        "about": _about(stage),
        "inputs": _inputs(stage),
        "outputs": _outputs(stage),
        "config": fields,
        "example": example(stage, name),
    }


def example(stage: Stage, uses: str) -> dict[str, Any]:
    """An example entry of a pipeline file: one of the library's if a pipeline there uses the stage, else a minimal
    one."""
    for name, entry in _library_entries():
        if entry.get("uses") == uses:
            return {name: entry}
    inputs = {
        name: f"A_STAGE_THAT_MAKES_{handle.kind.upper()}" for name, handle in stage.inputs.items() if handle.required
    }
    required = stage.config.model_json_schema(by_alias=True).get("required", [])
    entry = {"uses": uses, "inputs": inputs, "with": dict.fromkeys(required, "...")}
    return {stage.name.rpartition(".")[2].replace(".", "_"): {key: value for key, value in entry.items() if value}}


@cache
def _library_entries() -> list[tuple[str, dict[str, Any]]]:
    """The stages of the library's pipelines, as their files have them."""
    entries: list[tuple[str, dict[str, Any]]] = []
    for path in library_files().values():
        try:
            entries += parse(path.read_text(encoding="utf-8"), path).value.get("stages", {}).items()
        except SpecError:
            continue
    return entries


def _inputs(stage: Stage) -> dict[str, str]:
    return {
        name: str(handle.kind) + (", several" if handle.many else "") + ("" if handle.required else ", may be left out")
        for name, handle in stage.inputs.items()
    }


def _outputs(stage: Stage) -> dict[str, str]:
    return {name: str(kind) for name, kind in stage.outputs.items()}


def _about(stage: Stage) -> str:
    return " ".join((stage.function.__doc__ or "").replace("``", "`").split())


def _type(value: dict[str, Any]) -> str:
    """The type of a field of a JSON Schema, in a few words."""
    if "anyOf" in value or "oneOf" in value:
        return " or ".join(dict.fromkeys(_type(option) for option in value.get("anyOf") or value["oneOf"]))
    if "enum" in value or "const" in value:
        return ", ".join(map(str, value.get("enum") or [value["const"]]))
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}))}"
    return str(value.get("type", "anything"))


def print_listed(console: Console, stages_listed: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "reads", "makes", "about"):
        table.add_column(column, overflow="fold", no_wrap=column == "stage")
    for stage in stages_listed:
        table.add_row(stage["stage"], ", ".join(stage["inputs"]), ", ".join(stage["outputs"]), stage["about"])
    console.print(table)


def print_described(console: Console, description: dict[str, Any]) -> None:
    console.print(Text(f"{description['stage']}, version {description['version']}", style="bold"))
    console.print(f"{description['about']}\n")
    for title in ("inputs", "outputs"):
        console.print(title)
        for name, what in description[title].items():
            console.print(f"  {name}: {what}")
        if not description[title]:
            console.print("  none")
    table = Table(box=None, pad_edge=False, title="config (with)", title_justify="left", title_style="")
    for column in ("field", "type", "default", "about"):
        table.add_column(column, overflow="fold")
    for field in description["config"]:
        table.add_row(f"  {field['field']}", field["type"], str(field["default"]), field["about"])
    console.print(table)
    console.print(f"example\n{yaml_of(description['example'])}")


def yaml_of(value: Any) -> str:
    import io

    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    out = io.StringIO()
    yaml.dump({"stages": value}, out)
    return out.getvalue()
