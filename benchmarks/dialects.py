"""What becomes of tool calls in the dialects of many chat templates: `agentrl dialect` over templates, as a table.

    python benchmarks/dialects.py [FOLDER ...]   # writes benchmarks/results/dialects.md

Templates are those of the TRL wheel, and the *.jinja files of further folders; the committed table was made with
`models/templates` of llama.cpp, as the source package llama-cpp-python 0.3.36 on PyPI holds it. Templates belong to
their models' authors, so only results are kept. Each gets a small tokenizer with the control tokens that it writes.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import chat_families

from agentrl.chat.dialects import prove
from agentrl.chat.probes import PROBES

RESULT = Path(__file__).parent / "results" / "dialects.md"
HEAD = """# Dialects of chat templates

`python benchmarks/dialects.py` writes this page: `agentrl dialect` over {count} chat templates, with renderers
{renderers} and transformers {transformers}. {usable} of them can be used with tools, {told} of these because we tell
tools or answers ourselves; {without} only without tools, with the reason; {refused} not at all, with the reason.
Sources: *trl*, the wheel trl {trl}; *llama.cpp*, its `models/templates` in the package llama-cpp-python 0.3.36.

Probes that the template or we refuse have their names under "refused". Probes that do not come back as they were
written have theirs under "differs"; such turns are refused too.

{probes}

| source | template | dialect | refused | differs | no way with |
| --- | --- | --- | --- | --- | --- |
"""


def templates(folders: list[Path]) -> list[tuple[str, Path]]:
    """(source, file) of all templates; TRL's variants for training are left out."""
    own = [("trl", file) for file in sorted(chat_families.TEMPLATES.glob("*.jinja"))]
    others = [("llama.cpp", file) for folder in folders for file in sorted(folder.glob("*.jinja"))]
    return [(source, file) for source, file in own + others if not file.stem.endswith("_training")]


def cell(text: str) -> str:
    """A text in a cell of a table, in one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def line(source: str, file: Path) -> tuple[str, str]:
    """A line of the table, and what the template can be used for."""
    try:
        trial = prove(chat_families.tokenizer_of(file.stem, False, file.parent))
    except ValueError as error:
        return f"| {source} | {file.stem} | *refused*: {cell(str(error))} | | | |", "refused"
    verdicts = {
        verdict: ", ".join(name for name, outcome in trial.outcomes.items() if outcome.verdict == verdict)
        for verdict in ("refused", "differs")
    }
    cannot = "; ".join(f"{what}: {reason.partition('; set `model')[0]}" for what, reason in trial.codec.cannot.items())
    told = "told" if "in the system" in trial.codec.dialect or "as turns" in trial.codec.dialect else "own"
    kind = "without" if "tools" in trial.codec.cannot else told
    cells = [source, file.stem, trial.codec.dialect, verdicts["refused"], verdicts["differs"], cell(cannot)]
    return f"| {' | '.join(cells)} |", kind


def main() -> int:
    made = [line(source, file) for source, file in templates([Path(argument) for argument in sys.argv[1:]])]
    kinds = [kind for _, kind in made]
    head = HEAD.format(
        count=len(made),
        usable=kinds.count("own") + kinds.count("told"),
        probes="\n".join(f"- {name}: {probe.what}" for name, probe in PROBES.items()),
        **{kind: kinds.count(kind) for kind in ("told", "without", "refused")},
        **{package: version(package) for package in ("renderers", "transformers", "trl")},
    )
    RESULT.write_text(head + "\n".join(text for text, _ in made) + "\n")
    print(f"{len(made)} templates: {', '.join(f'{kind} {kinds.count(kind)}' for kind in sorted(set(kinds)))}")
    return int(not made)


if __name__ == "__main__":
    sys.exit(main())
