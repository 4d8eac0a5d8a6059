"""The pages of the site: those of the repository and those made from the code, before MkDocs renders them."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/site"))

import assemble  # noqa: E402
import hooks  # noqa: E402

from agentrl.pipelines.file.load import load  # noqa: E402
from agentrl.pipelines.file.problems import SpecError  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return assemble.assembled()


def anchors(text: str) -> set[str]:
    text = assemble.FENCE.sub("", text)
    headings = re.findall(r"^#+ +(.*?) *$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain} | set(
        re.findall('id="([^"]+)"', text)
    )


def test_links_and_anchors_of_every_page_exist(pages: dict[str, str]) -> None:
    broken = []
    for name, text in pages.items():
        prose = re.sub(r"`[^`\n]*`", "", assemble.FENCE.sub("", text))
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", prose):
            page = os.path.normpath(os.path.join(os.path.dirname(name), target)) if target else name
            if page.startswith("images/"):
                assert (ROOT / "docs" / page).is_file()
            elif page not in pages or (anchor and anchor not in anchors(pages[page])):
                broken.append(f"{name}: {target}#{anchor}")
    assert not broken


def test_a_link_that_leads_nowhere_ends_the_build() -> None:
    broken: list[str] = []
    here = Path("docs", "x.md")
    text = assemble.with_links(
        "[a](b.md) [c](d.md) `[e](f.md)`", here, "x.md", {Path("docs", "b.md"): "y/b.md"}, broken
    )
    assert (text[:13], text[-11:], broken) == ("[a](y/b.md) [", "`[e](f.md)`", [f"{here}: there is no d.md"])


def test_every_setting_of_every_stage_has_one_anchor(pages: dict[str, str]) -> None:
    from agentrl.pipelines.file.library import builtin_stages

    for name, stage in builtin_stages().items():
        ids = re.findall('<a id="([^"]+)">', pages[f"reference/stages/{name}.md"])
        assert len(ids) == len(set(ids)), name
        assert {info.alias or field for field, info in stage.config.model_fields.items()} <= set(ids), name
    assert '<a id="optimizer.lora.rank"></a>' in pages["reference/stages/train.sft.md"]
    assert "| [algorithm](../choices/algorithm.md) |" in pages["reference/stages/train.online.md"]
    assert '<a id="grpo.clip_high"></a>`clip_high` | number > 0' in pages["reference/choices/algorithm.md"]
    assert '<a id="rooms.slip"></a>' in pages["reference/choices/environment.md"]
    assert '<a id="stages.with"></a>' in pages["reference/pipeline-file.md"]


def test_every_setting_and_option_says_what_it_is(pages: dict[str, str]) -> None:
    silent = [
        f"{path}: {line}"
        for path, text in pages.items()
        if path.startswith("reference/")
        for line in text.splitlines()
        if line.startswith("| ") and line.endswith("|  |")
    ]
    assert silent == []


def test_problems_of_a_file_name_anchors_that_exist(pages: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "name: p\nstages:\n  a:\n    uses: train.online\n    inputs: {model: a, tasks: a}\n    with:\n      stepz: 1\n"
        "      iterations: many\n      optimizer: {lr: -1, rate: 2}\n      algorithm: {type: grpo, clip_hihg: 1}\n"
    )
    with pytest.raises(SpecError) as raised:
        load(str(tmp_path / "p.yaml"))
    result = {problem.reference for problem in raised.value.problems if problem.reference}
    page = "reference/stages/train.online"
    assert result == {page, f"{page}#iterations", f"{page}#optimizer", f"{page}#optimizer.lr", f"{page}#algorithm"}
    for name in result:
        path, _, anchor = name.partition("#")
        assert not anchor or f'<a id="{anchor}">' in pages[f"{path}.md"], name
    assert all("reference" in problem.to_json() for problem in raised.value.problems)


def test_the_reference_has_every_command_and_public_name(pages: dict[str, str]) -> None:
    import agentrl

    for name in ("run", "buffer query", "schedule", "view export"):
        assert f"## agentrl {name}\n" in pages["reference/command.md"]
    assert pages["reference/api.md"].count("\n::: ") == len(agentrl.__all__) - 1
    twin = assemble.reference.api_twin()
    assert "### Store.sql\n\n```python\nsql(self, query: str" in twin


def paths(navigation: list[Any]) -> list[str]:
    return [
        path
        for item in navigation
        for value in item.values()
        for path in ([value] if isinstance(value, str) else paths(value))
    ]


def test_navigation_has_each_page_once_in_its_section(pages: dict[str, str]) -> None:
    navigation = assemble.navigation(pages)
    assert sorted(paths(navigation)) == sorted(pages)
    sections = ["Start", "Tutorials", "How-to", "Reference", "Explanations", "Results", "About"]
    assert [name for item in navigation for name in item] == sections
    folders = {"Tutorials": {"tutorials"}, "How-to": {"how-to"}, "Reference": {"reference"}, "Results": {"results"}}
    for item in navigation:
        for name, value in item.items():
            if name in folders:
                assert {path.partition("/")[0] for path in paths(value)} == folders[name], name


def test_lists_are_those_of_python_markdown() -> None:
    given = "Words:\n- one\n  more\n  - below\n- two\n\n```\nx\n- no list\n```\n| a |\n- b"
    wanted = "Words:\n\n- one\n    more\n    - below\n- two\n\n```\nx\n- no list\n```\n| a |\n- b"
    assert assemble.for_markdown(given) == wanted


def test_twins_and_llms_txt_name_every_page(pages: dict[str, str], tmp_path: Path) -> None:
    few = {name: pages[name] for name in ("index.md", "reference/api.md", "tutorials/quickstart.md")}
    for name, text in few.items():
        path = tmp_path / "pages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "twins/reference").mkdir(parents=True)
    (tmp_path / "twins/reference/api.md").write_text("# API\n\nAs text. More.\n")
    navigation = [
        {"Start": "index.md"},
        {"Tutorials": [{"Q": "tutorials/quickstart.md"}]},
        {"Reference": [{"API": "reference/api.md"}]},
    ]
    site = tmp_path / "site"
    hooks.on_post_build(
        {
            "site_dir": str(site),
            "docs_dir": str(tmp_path / "pages"),
            "nav": navigation,
            "site_name": "n",
            "site_description": "d",
        }
    )
    short = (site / "llms.txt").read_text()
    assert short.startswith("# n\n\n> d")
    assert "\n## Reference\n\n- [API](reference/api.md): As text.\n" in short
    assert (site / "tutorials/quickstart.md").read_text() == few["tutorials/quickstart.md"]
    full = (site / "llms-full.txt").read_text()
    assert "<!-- tutorials/quickstart.md -->" in full
    assert "As text. More." in full


def test_the_theme_fetches_nothing() -> None:
    config = (ROOT / "docs/site/mkdocs.yml").read_text()
    assert yaml.safe_load(config.partition("\nplugins:")[0].replace("!!", ""))["theme"]["font"] is False
    assert "assets/mermaid.min.js" in config
    assert not re.search(r"^repo_url:", config, re.M)
