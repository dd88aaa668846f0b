"""What an object store that is ill answers."""

from __future__ import annotations

import io

from tests.chaos.seeded.object_store import Ill, Server


def answered(server: Server, method: str = "GET") -> tuple[str, bytes]:
    statuses: list[str] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": "/bucket/key", "wsgi.input": io.BytesIO()}
    body = server(environ, lambda status, *_: statuses.append(status))
    return statuses[0], b"".join(body)


def server(ill: Ill) -> Server:
    def well(environ: dict, start) -> list[bytes]:
        start("200 OK", [])
        return [b"well"]

    made = Server(well)
    made.be(ill)
    return made


def test_a_store_that_is_well_lets_all_through():
    assert answered(server(Ill())) == ("200 OK", b"well")


def test_errors_are_500_and_503_and_a_refused_head_has_no_body():
    ill = server(Ill(errors=1.0))
    assert {answered(ill)[0][:3] for _ in range(100)} == {"500", "503"}
    assert answered(ill)[1].startswith(b"<?xml")
    assert answered(ill, "HEAD")[1] == b""


def test_throttling_lets_few_through():
    statuses = [answered(server)[0] for server in [server(Ill(a_second=0.001))] for _ in range(5)]
    assert statuses == ["200 OK", *["503 Slow Down"] * 4]
