"""What the lab lets in, over real HTTP: its token, its host, its origin, its own files, small JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
import torch

import clearhead as ch
from clearhead.lab.app import page_files
from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.lab.work import Work
from tests.lab.running import asked, running, sent

ECHO = Work("echo", lambda params, ticket: dict(params))
LIMITS = Limits(body=2000)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running(limits=LIMITS, works=[ECHO]) as started:
        yield started


def test_page_files_have_their_media_type_and_a_strict_policy(lab: Lab) -> None:
    page = sent(lab, "GET", f"/{lab.token}/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"clearhead lab" in page.body
    script = sent(lab, "GET", f"/{lab.token}/lab.js")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    for answer in (page, script, sent(lab, "GET", "/"), asked(lab, "echo"), sent(lab, "GET", f"/{lab.token}/none")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["frame-ancestors"] == "'self'"
        assert "server" not in answer.headers


def test_job_answers_with_its_result(lab: Lab) -> None:
    answer = asked(lab, "echo", {"text": "ä ☃"})
    assert (answer.status, answer.lines) == (200, [{"result": {"text": "ä ☃"}}])


@pytest.mark.parametrize("token", ["", "x", "{token}x", "x{token}", "{short}", "%00", "ä", "{upper}"])
def test_request_without_the_token_is_not_found(lab: Lab, token: str) -> None:
    token_value = lab.token
    path = (
        token.format(token=token_value, short=token_value[:-1], upper=token_value.swapcase())
        .encode("utf-8")
        .decode("latin-1")
    )
    for rest in ("/", "/lab.js", "/works/echo", "/views/x"):
        for method in ("GET", "POST"):
            path = path.replace("ä", "%C3%A4").replace("\xc3\xa4", "%C3%A4")
            answer = sent(lab, method, f"/{path}{rest}", b"{}", {"Content-Type": "application/json"})
            assert answer.status == 404
            assert token_value not in answer.body.decode()


def test_token_is_long_and_random(lab: Lab) -> None:
    with running() as other:
        assert other.token != lab.token
        assert len(other.token) >= 32
        assert sent(other, "GET", f"/{lab.token}/").status == 404


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "127.0.0.1.evil:{port}", ""],
)
def test_other_host_is_refused(lab: Lab, host: str) -> None:
    for path in (f"/{lab.token}/", "/"):
        answer = sent(lab, "GET", path, headers={"Host": host.format(port=lab.port)})
        assert answer.status == 421
        assert answer.last["error"].startswith("lab: only 127.0.0.1 and localhost are served.")


def test_localhost_is_accepted(lab: Lab) -> None:
    assert sent(lab, "GET", f"/{lab.token}/", headers={"Host": f"localhost:{lab.port}"}).status == 200


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:{port}", "http://127.0.0.1", ""]
)
def test_other_origin_is_refused(lab: Lab, origin: str) -> None:
    answer = asked(lab, "echo", headers={"Origin": origin.format(port=lab.port)})
    assert answer.status == 403
    assert "another origin" in answer.last["error"]


def test_same_origin_is_accepted(lab: Lab) -> None:
    assert asked(lab, "echo", {"a": 1}, {"Origin": f"http://127.0.0.1:{lab.port}"}).last == {"result": {"a": 1}}


@pytest.mark.parametrize("site", ["cross-site", "same-site", "odd"])
def test_requests_of_other_pages_are_refused(lab: Lab, site: str) -> None:
    for answer in (
        sent(lab, "GET", f"/{lab.token}/", headers={"Sec-Fetch-Site": site}),
        asked(lab, "echo", headers={"Sec-Fetch-Site": site}),
    ):
        assert answer.status == 403
        assert answer.last["error"].startswith("lab: requests of other pages are refused.")
    assert asked(lab, "echo", headers={"Sec-Fetch-Site": "same-origin"}).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "../lab.js", "../../etc/passwd", "%2e%2e/lab.js", "..%2flab.js", "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/etc/passwd", "//etc/passwd", "%2fetc%2fpasswd", "..\\lab.js", "..%5clab.js", "lab.js/", "./lab.js",
        "page/lab.js", "lab.js%00", "LAB.JS", "__init__.py", "app.py", "..", ".", "file:///etc/passwd", "views/",
        "views", "views/..%2f..%2fetc%2fpasswd", "views/../lab.js", "works", "docs", "openapi.json", "lab.html",
        "favicon.ico",
    ],
)  # fmt: skip
def test_only_paths_in_the_table_are_served(lab: Lab, path: str) -> None:
    answer = sent(lab, "GET", f"/{lab.token}/{path}")
    assert answer.status == 404
    assert set(answer.last) == {"error"}
    assert answer.last["error"].startswith("lab: ")


def test_absolute_request_target_is_read_as_its_path(lab: Lab) -> None:
    assert sent(lab, "GET", f"http://evil.example/{lab.token}/").status in (200, 400, 404)
    assert sent(lab, "GET", "http://evil.example/etc/passwd").status in (400, 404)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST"])
def test_other_methods_are_refused(lab: Lab, method: str) -> None:
    answer = sent(lab, method, f"/{lab.token}/lab.js")
    assert answer.status in (404, 405)
    assert b"import" not in answer.body
    assert sent(lab, "GET", f"/{lab.token}/works/echo").status in (404, 405)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "must be JSON"),
        (b"{", 400, "must be JSON"),
        (b"[1]", 400, "one JSON object"),
        (b"null", 400, "one JSON object"),
        (b'"text"', 400, "one JSON object"),
        (b'{"a": NaN}', 400, "must be JSON"),
        (b'{"a": 1e999}', 400, "must be JSON"),
        (b'{"a": "\\ud800"}', 400, "must be JSON"),
        (b"\xff\xfe{}", 400, "must be JSON"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, 200, None),
        (b'{"a": "' + b"x" * 2000 + b'"}', 413, "at most 2,000 bytes"),
        (b"[" * 1900, 400, "must be JSON"),
    ],
)
def test_body_must_be_a_small_json_object(lab: Lab, body: bytes, status: int, says: str | None) -> None:
    answer = sent(lab, "POST", f"/{lab.token}/works/echo", body, {"Content-Type": "application/json"})
    assert answer.status == status
    assert says is None or says in answer.last["error"]


def test_body_is_read_up_to_its_limit(lab: Lab) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(10**12)}
    assert sent(lab, "POST", f"/{lab.token}/works/echo", b"{", headers).status == 413
    chunks = b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
    answer = _chunked(lab, f"/{lab.token}/works/echo", chunks)
    assert b" 413 " in answer.partition(b"\r\n")[0]


def _chunked(lab: Lab, path: str, chunks: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", lab.port), timeout=10) as made:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode() + chunks)
        return made.recv(4096)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_form_of_another_page_is_refused(lab: Lab, kind: str) -> None:
    answer = sent(lab, "POST", f"/{lab.token}/works/echo", b"{}", {"Content-Type": kind})
    assert answer.status == 415
    assert answer.last["error"] == "lab: only application/json is accepted."


def test_content_type_may_have_a_charset(lab: Lab) -> None:
    answer = asked(lab, "echo", {}, {"Content-Type": "application/json; charset=utf-8"})
    assert answer.status == 200


@pytest.mark.parametrize("name", ["none", "Echo", "echo/", "..%2fecho", "__class__"])
def test_unknown_job_is_refused(lab: Lab, name: str) -> None:
    assert asked(lab, name).status == 404


def test_lab_listens_on_127_0_0_1_only(lab: Lab) -> None:
    address_of_host = socket.gethostbyname(socket.gethostname())
    for address in {"127.0.0.2", address_of_host} - {"127.0.0.1"}:
        with socket.socket() as made:
            made.settimeout(2)
            assert made.connect_ex((address, lab.port)) != 0
    with socket.socket(socket.AF_INET6) as made:
        made.settimeout(2)
        assert made.connect_ex(("::1", lab.port)) != 0


def test_answers_are_complete_json_lines(lab: Lab) -> None:
    text = "\n\r\u2028</script><img src=x onerror=alert(1)>"
    answer = asked(lab, "echo", {"text": text})
    assert [json.loads(line) for line in answer.body.split(b"\n") if line] == [{"result": {"text": text}}]
    assert answer.headers["content-type"] == "application/x-ndjson"


def test_stored_view_is_served_in_a_sandbox(lab: Lab) -> None:
    name = lab.views.add(ch.view(torch.eye(3), torch.eye(3), tokens=["a", "b", "</script>"]))
    answer = sent(lab, "GET", f"/{lab.token}/views/{name}")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts allow-downloads; frame-ancestors 'self'; default-src 'none'")
    assert "allow-same-origin" not in policy
    gone = sent(lab, "GET", f"/{lab.token}/views/{name}x")
    assert (gone.status, gone.last) == (404, {"error": "lab: this view is no longer stored. Press Look again."})


def test_no_script_scrolls_a_page_that_embeds_it() -> None:
    scripts = {name: body.decode() for name, (body, kind) in page_files().items() if "javascript" in kind}
    assert [name for name, text in scripts.items() if ".scrollIntoView(" in text] == []
