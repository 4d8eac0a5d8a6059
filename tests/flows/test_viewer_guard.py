"""The viewer's door: other sites, other names of this host, paths that climb, and tokens."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from viewer_store import Browser

from agentrl.flows.viewer import app as viewer
from agentrl.flows.viewer.guard import CONTENT_SECURITY_POLICY, HEADERS, Door, is_loopback


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.fixture
def front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of our own, since the real one may change."""
    static = tmp_path / "front" / "static"
    (static / "vendor").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html><title>page</title>")
    (static / "main.js").write_text("export const x = 1;\n" * 100)
    (static / "vendor/lib.js").write_text("export {};")
    (static.parent / "secret.txt").write_text("a secret")
    (static / "link.js").symlink_to(static.parent / "secret.txt")
    monkeypatch.setattr(viewer, "STATIC", static)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:8322",
            "evil.example:8322",
            "localhost@evil",
        ),
        *("localhost#evil", "localhost/evil", "", " ", "[::1", "[evil]", "0.0.0.0", "192.168.0.7", "127.0.0.1, evil"),
        *("lоcalhost", "localhost\\evil", "2130706433", "0x7f.1", "127.1"),
    ],
)
def test_other_names_of_this_host_are_refused(browser: Browser, host: str) -> None:
    """A name of an attacker's that resolves to this machine (DNS rebinding)."""
    status, headers, body = browser.raw(b"/api/overview", [(b"host", host.encode())])
    assert status == 403
    assert b"is not this server" in body
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8322", "127.0.0.1:1", "[::1]:8322", "127.0.0.2"])
def test_names_of_this_machine_are_let_in(browser: Browser, host: str) -> None:
    assert browser.raw(b"/api/session", [(b"host", host.encode())])[0] == 204


def test_a_request_names_one_host(browser: Browser) -> None:
    assert browser.raw(b"/api/session", [])[0] == 403
    assert browser.raw(b"/api/session", [(b"host", b"localhost"), (b"host", b"evil.example")])[0] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://127.0.0.1:8322.evil.example"}, 403),
        ({"origin": "file://"}, 403),
        ({"origin": "http://127.0.0.1:8322"}, 204),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "nonsense"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
        ({"sec-fetch-site": "same-origin"}, 204),
        ({"sec-fetch-site": "none"}, 204),
    ],
)
def test_requests_that_other_sites_cause_are_refused(browser: Browser, headers: dict[str, str], status: int) -> None:
    assert browser.ask("/api/session", headers=headers).status_code == status


@pytest.mark.usefixtures("front_end")
def test_a_link_on_another_site_opens_a_page_and_embeds_nothing(tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert browser.ask("/rows/x", headers=linked).status_code == 200
    assert browser.ask("/rows/x", headers={**linked, "sec-fetch-dest": "iframe"}).status_code == 403
    assert browser.ask("/static/main.js", headers=linked).status_code == 403
    assert browser.ask("/static/main.js", headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_allowed(browser: Browser, method: str) -> None:
    for path in ("/api/overview", "/static/main.js", "/"):
        assert browser.ask(path, method).status_code == 405


KEY = "the-key"
ALLOWED = {"x-agentrl-key": KEY, "origin": "http://127.0.0.1:8322", "sec-fetch-site": "same-origin"}


@pytest.fixture
def writer(tmp_path: Path) -> Browser:
    return Browser(tmp_path, Door("127.0.0.1", 8322, write=True, key=KEY))


def test_the_key_is_told_only_if_the_viewer_may_write(browser: Browser, writer: Browser) -> None:
    assert browser.json("/api/writing") == {"key": None}
    assert writer.json("/api/writing") == {"key": KEY}
    for headers in (
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        answer = writer.ask("/api/writing", headers=headers)
        assert (answer.status_code, KEY in answer.text) == (403, False)
    assert writer.raw(b"/api/writing", [(b"host", b"evil.example")])[0] == 403
    assert "access-control-allow-origin" not in writer.ask("/api/writing").headers


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"x-agentrl-key": None}, 403),
        ({"x-agentrl-key": ""}, 403),
        ({"x-agentrl-key": "the-ke"}, 403),
        ({"x-agentrl-key": "the-keyé"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
        ({"host": "evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "text/plain; application/json"}, 415),
    ],
)
def test_no_other_page_can_write(writer: Browser, changed: dict[str, str | None], status: int) -> None:
    """Forms, scripts and images of other sites can send some of what a POST needs, and never all."""
    headers = {name: value.encode() for name, value in (ALLOWED | changed).items() if value is not None}
    for path in ("/api/selection", "/api/annotation", "/api/overview", "/", "/static/main.js", "/api/none"):
        answer = writer.ask(path, "POST", headers=headers, body={})  # type: ignore[arg-type]
        assert answer.status_code == status, path
        assert HEADERS.items() <= dict(answer.headers).items()


def test_a_page_of_the_viewer_writes_by_post_alone(browser: Browser, writer: Browser) -> None:
    assert writer.ask("/api/selection", "POST", headers=ALLOWED, body={}).json()["field"] == "name"
    assert writer.ask("/api/selection", "GET", headers=ALLOWED).status_code == 404
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert writer.ask("/api/selection", method, headers=ALLOWED, body={}).status_code == 405
    for path in ("/api/overview", "/api/session", "/", "/static/main.js", "/api/writing"):
        assert writer.ask(path, "POST", headers=ALLOWED, body={}).status_code == 405
    refused = browser.ask("/api/selection", "POST", headers=ALLOWED, body={})
    assert (refused.status_code, refused.json()["next"]) == (405, "agentrl view --write")


def test_a_body_is_a_short_object_of_known_fields(writer: Browser) -> None:
    def sent(body: Any) -> httpx.Response:
        return writer.ask("/api/annotation", "POST", headers=ALLOWED, body=body)

    given = {"annotation_id": "12345678", "trajectory_id": "none", "name": "thumbs", "author": "ann"}
    assert sent(given | {"comment": "x" * 70_000}).status_code == 413
    assert sent(given | {"shell": "ls"}).json()["field"] == "shell"
    assert sent([1]).status_code == 400
    assert sent(given | {"turn": -1}).status_code == 400
    assert sent(given | {"value": "up"}).status_code in (400, 404)


def test_whoever_writes_needs_the_cookie_too(tmp_path: Path) -> None:
    writer = Browser(tmp_path, Door("127.0.0.1", 8322, "the-token", write=True, key=KEY))
    assert writer.ask("/api/writing").status_code == 401
    assert writer.ask("/api/selection", "POST", headers=ALLOWED, body={}).status_code == 401
    cookie = writer.ask("/api/session", headers={"x-agentrl-token": "the-token"}).headers["set-cookie"].split(";")[0]
    assert writer.ask("/api/selection", "POST", headers=ALLOWED | {"cookie": cookie}, body={}).json()["field"] == "name"
    assert writer.ask("/api/session", "POST", headers=ALLOWED | {"x-agentrl-token": "no"}, body={}).status_code == 401


@pytest.mark.usefixtures("front_end")
def test_every_answer_has_the_headers(tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    for path, status in {
        "/": 200,
        "/trajectory/x": 200,
        "/static/main.js": 200,
        "/static/none.js": 404,
        "/api/none": 404,
        "/api/rows": 404,
        "/api/rows?nonsense=1": 400,
        "/api/session": 204,
    }.items():
        answer = browser.ask(path)
        assert answer.status_code == status, path
        assert HEADERS.items() <= dict(answer.headers).items(), path
    assert "script-src 'self'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY


@pytest.mark.usefixtures("front_end")
@pytest.mark.parametrize(
    "name",
    [
        *("../secret.txt", "../../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "%2e%2e%2fsecret.txt"),
        *("..%5csecret.txt", "..\\secret.txt", "%252e%252e/secret.txt", "vendor/../../secret.txt", "/etc/passwd"),
        *("%2fetc%2fpasswd", "vendor/%00", "main.js%00.txt", ".", "", "vendor", "....//secret.txt", "~/.ssh/id_rsa"),
    ],
)
def test_no_path_leaves_the_front_end(tmp_path: Path, name: str) -> None:
    status, _, body = Browser(tmp_path).raw(b"/static/" + name.encode())
    assert status == 404
    assert b"secret" not in body.replace(b"secret.txt", b"")


@pytest.mark.usefixtures("front_end")
def test_files_come_with_their_type_compressed_and_once(tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    whole = browser.ask("/static/main.js", headers={"accept-encoding": "identity"})
    small = browser.ask("/static/main.js", headers={"accept-encoding": "gzip"})
    assert whole.headers["content-type"] == "text/javascript; charset=utf-8"
    assert small.headers["content-encoding"] == "gzip"
    assert int(small.headers["content-length"]) < len(whole.content) / 10
    assert small.content == whole.content
    again = browser.ask("/static/main.js", headers={"if-none-match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert browser.ask("/static/vendor/lib.js").text == "export {};"


def test_beyond_this_machine_a_token_opens_the_door(tmp_path: Path) -> None:
    door = Door("0.0.0.0", 8322, "the-token")
    browser = Browser(tmp_path, door)
    assert browser.ask("/api/overview").status_code == 401
    for wrong in ({}, {"x-agentrl-token": ""}, {"x-agentrl-token": "the-toke"}, {"x-agentrl-token": "é"}):
        answer = browser.ask("/api/session", headers={k: v.encode() for k, v in wrong.items()})  # type: ignore[misc]
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    opened = browser.ask("/api/session", headers={"x-agentrl-token": "the-token"})
    assert opened.status_code == 204
    cookie, *flags = opened.headers["set-cookie"].split("; ")
    assert flags == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert "the-token" not in cookie
    assert browser.ask("/api/overview", headers={"cookie": cookie}).status_code == 200
    assert browser.ask("/api/overview", headers={"cookie": f"{door.cookie}=guess"}).status_code == 401
    assert browser.ask("/api/overview?token=the-token").status_code == 401
    assert browser.raw(b"/api/session", [(b"host", b"evil.example"), (b"x-agentrl-token", b"the-token")])[0] == 403
    assert browser.raw(b"/", [(b"host", b"192.168.0.7:8322")])[0] != 403


def test_addresses_that_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.1", "example.com", "", "127.0.0.1.evil.example"]))


def test_a_page_names_all_modules_that_it_needs_at_addresses_that_never_change(browser: Browser) -> None:
    page = browser.ask("/row/some-id").text
    named = re.findall(
        r'<link rel="modulepreload" href="\.\.(/static/([0-9a-f]{16})/([^"]+))">', page
    )  # below a proxy too
    names = {name for _, _, name in named}
    assert {"main.js", "trajectory.js", "tokens.js", "vendor/preact.js"} <= names
    assert not {"overview.js", "facets.js"} & names  # of other pages
    assert len({digest for _, digest, _ in named}) == 1
    for address, _, name in named:
        module = browser.ask(address)
        assert "immutable" in module.headers["cache-control"], name
        assert set(re.findall(r"""\bfrom\s*["']\./([\w.-]+)["']""", module.text)) <= {
            name.split("/")[-1] for name in names
        }
    assert browser.ask(f"/static/{'0' * 16}/main.js").status_code == 404
    assert "immutable" not in browser.ask("/static/main.js").headers["cache-control"]


def test_a_page_names_the_questions_that_its_scripts_will_ask(browser: Browser) -> None:
    def links(path: str, **headers: str) -> list[str]:
        text = browser.ask(path, headers=headers).headers.get("link", "")
        return re.findall(r"<([^>]+)>; rel=preload; as=fetch; crossorigin", text)

    assert links("/") == ["./api/overview", "./api/evaluations"]
    for asked, name in (("a%2Fb%20c", "a%2Fb%20c"), ("%3E;%22", "%3E%3B%22")):
        assert links(f"/row/{asked}") == [f"../api/rows/{name}", f"../api/tokens/{name}"]
    for other in ("/?pipeline=mine", "/row/a?at=3", "/row", "/row/", "/buffer"):
        assert links(other) == [], other


def test_who_has_no_session_is_sent_no_questions(tmp_path: Path) -> None:
    """Their answers would be refusals, and kept for the scripts, which ask after the token was exchanged."""
    browser = Browser(tmp_path, Door("0.0.0.0", 8322, "the-token"))
    assert "link" not in browser.ask("/").headers
    cookie = browser.ask("/api/session", headers={"x-agentrl-token": "the-token"}).headers["set-cookie"]
    assert "link" in browser.ask("/", headers={"cookie": cookie.partition(";")[0]}).headers
