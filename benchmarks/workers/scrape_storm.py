"""What strangers and eager scrapers do to one agent's HTTP server, all at once, until the time is over.

    scrape_storm.py PORT SECONDS [SCRAPES_PER_SECOND]

Some threads scrape at a steady rate, as fast as they get answers. Meanwhile there are 500 connections that ask nothing, and come
again when they are cut; a client that reads a byte now and then; and others that send rubbish, what looks like TLS, and a header
of 10 MB. Prints one JSON object: whole scrapes, those that failed, and how often each of the others came.
"""

import collections
import json
import os
import socket
import sys
import threading
import time

SCRAPERS = 8
IDLE = 500
RUBBISH_S = 0.05  # between two clients that send rubbish
IDLE_S = 1.0  # between two looks at the idle connections
ATTEMPT_S = 10.0  # the longest scrape; Prometheus' default
HEADER = b"x-header: " + b"y" * (10 << 20)
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a client's hello begins

port, seconds = int(sys.argv[1]), float(sys.argv[2])
rate = float(sys.argv[3]) if len(sys.argv) > 3 else 1000.0
began = time.monotonic()
end = began + seconds
counts: collections.Counter[str] = collections.Counter()
lock = threading.Lock()


def count(what: str, number: int = 1) -> None:
    with lock:
        counts[what] += number


def connect(receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(ATTEMPT_S)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", port))
    return client


def scrape() -> bool:
    answer = b""
    try:
        with connect() as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while piece := client.recv(1 << 16):
                answer += piece
    except OSError:
        return False
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.0 200 ") and f"Content-Length: {len(body)}\r\n".encode() in head


def scrape_at_a_rate(number: int) -> None:
    due = began + number / rate
    while due < end:
        time.sleep(max(0.0, due - time.monotonic()))
        count("scrapes" if scrape() else "failed")
        due = max(due + SCRAPERS / rate, time.monotonic() - 1.0)  # who is late catches up, but by no more than a second


def send(what: str, pieces: list[bytes]) -> None:
    while time.monotonic() < end:
        try:
            with connect() as client:
                for piece in pieces:
                    client.sendall(piece)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
        except OSError:
            pass  # cut, as it should be
        count(what)
        time.sleep(RUBBISH_S)


def idle() -> None:
    clients: list[socket.socket | None] = [None] * IDLE
    while time.monotonic() < end:
        for at, client in enumerate(clients):
            try:
                if client is not None and client.recv(1) == b"":
                    raise ConnectionError
            except BlockingIOError:
                continue
            except OSError:
                client.close()
                client = None
            if client is None:
                clients[at] = client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                count("idle connections")
        time.sleep(min(IDLE_S, max(0.0, end - time.monotonic())))


def read_slowly() -> None:
    while time.monotonic() < end:
        try:
            with connect(receive_buffer=4096) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                while client.recv(1) and time.monotonic() < end:
                    time.sleep(0.1)
        except OSError:
            pass
        count("slow readers")


others = [
    threading.Thread(target=send, args=("rubbish", [os.urandom(2000)])),
    threading.Thread(target=send, args=("TLS garbage", [TLS + os.urandom(2000)])),
    threading.Thread(target=send, args=("10 MB headers", [b"GET /metrics HTTP/1.1\r\n", HEADER])),
    threading.Thread(target=idle),
    threading.Thread(target=read_slowly),
]
scrapers = [threading.Thread(target=scrape_at_a_rate, args=(number,)) for number in range(SCRAPERS)]
for thread in (*others, *scrapers):
    thread.start()
for thread in (*others, *scrapers):
    thread.join()
took_s = time.monotonic() - began
print(json.dumps({"seconds": round(took_s, 2), "per_second": round(counts["scrapes"] / took_s, 1), **counts}))
