"""Viewers below paths: the prefix of a proxy, and several stores behind one port."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from viewer_store import Browser, make_store, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.app import application, opening
from agentrl.flows.viewer.below import Below, base_of, named
from agentrl.flows.viewer.guard import TOKEN_HEADER, Door


def asked(app: Any, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8322") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Below:
    """Two stores below the path of a proxy, behind a token."""
    folder = tmp_path_factory.mktemp("below")
    door = Door("127.0.0.1", 8322, token="open", base="/user/ann@x")
    stores = {name: str(folder / name) for name in ("first", "second")}
    for number, store in enumerate(stores.values()):
        make_store(Path(store), rows=3 + number)
    return Below(
        {
            f"/user/ann@x/{name}": application(opening(store), door, stores=list(stores), name=name)
            for name, store in stores.items()
        }
    )


def test_each_store_answers_below_its_own_path_and_the_token_holds_there(app: Below) -> None:
    refused = asked(app, "/user/ann@x/first/api/rows")
    assert refused.status_code == 401
    session = asked(app, "/user/ann@x/first/api/session", {TOKEN_HEADER: "open"})
    assert "Path=/user/ann@x/;" in session.headers["set-cookie"]
    cookie = {"cookie": session.headers["set-cookie"].partition(";")[0]}
    totals = [asked(app, f"/user/ann%40x/{name}/api/rows", cookie).headers["x-total"] for name in ("first", "second")]
    assert int(totals[1]) == int(totals[0]) + 1
    stores = asked(app, "/user/ann@x/second/api/stores", cookie).json()
    assert stores == {"name": "second", "stores": ["first", "second"]}


@pytest.mark.parametrize(
    "path", ["/", "/user/ann@x", "/api/rows", "/user/ann@x/third/", "/user%2Fann@x/first/api/rows"]
)
def test_every_other_address_leads_to_the_first_store(app: Below, path: str) -> None:
    answer = asked(app, path)
    assert (answer.status_code, answer.headers["location"]) == (307, "/user/ann@x/first/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_pages_name_their_files_relative_to_their_own_address(app: Below) -> None:
    page = asked(app, "/user/ann@x/first/row/a%2Fb").text
    assert 'src="../static/' in page
    assert "ann@x" not in page


@pytest.mark.parametrize(("text", "base"), [("", ""), ("/", ""), ("a/b/", "/a/b"), ("/user/ann@x", "/user/ann@x")])
def test_a_base_path_has_one_form(text: str, base: str) -> None:
    assert base_of(text) == base


@pytest.mark.parametrize("text", ["/a b", "/../x", "http://x/", "/a?b", "/%2e"])
def test_what_is_no_base_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as in /user/ann/proxy/8322"):
        base_of(text)


def test_stores_of_one_name_are_told_apart() -> None:
    assert list(named(["a/store", "b/store", "s3://bucket/run 1/"])) == ["store", "store-2", "run-1"]


def test_pages_without_data_have_no_tab(tmp_path: Path) -> None:
    assert Browser(tmp_path).json("/api/tabs") == {"paths": ["/"]}
    TrajectoryBuffer(tmp_path / "rows").append([row(1)], stage="s", fingerprint="a" * 32)
    assert Browser(tmp_path / "rows").json("/api/tabs")["paths"] == ["/", "/buffer", "/calls", "/labels"]
    make_store(tmp_path / "whole", rows=2)
    paths = Browser(tmp_path / "whole").json("/api/tabs")["paths"]
    assert {"/buffer", "/evaluation"} <= set(paths)
    assert "/pair" not in paths
