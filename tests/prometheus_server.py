"""A real Prometheus for tests, with the rules of entrypoints/monitoring, always reaped. Debian's package `prometheus`."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tests.jobs import ROOT, Job
from tests.ports import free_port
from tests.programs import needs
from tests.until import LIMIT_S, until

MONITORING = ROOT / "entrypoints" / "monitoring"
RULES = ("recording_rules.yml", "alert_rules.yml")
TIMEOUT_S = 240.0

Samples = dict[tuple[tuple[str, str], ...], float]


class PrometheusServer:
    """It scrapes every `every`. scrape: the YAML of its scrape_configs. change: what to replace in the rules."""

    def __init__(
        self, folder: Path, scrape: str, every: str = "1s", evaluated: str = "500ms", change: dict[str, str] | None = None
    ) -> None:
        needs("prometheus")
        folder.mkdir()
        for name in RULES:
            text = (MONITORING / name).read_text()
            for old, new in (change or {}).items():
                text = text.replace(old, new)
            (folder / name).write_text(text)
        # Rules are evaluated twice a scrape: one that was late would miss what a single scrape has seen.
        times = f"scrape_interval: {every}, scrape_timeout: {every}, evaluation_interval: {evaluated}"
        (folder / "config.yml").write_text(
            f"global: {{{times}}}\nrule_files: [{', '.join(RULES)}]\nscrape_configs:\n{scrape}",
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self._job = Job(
            [
                *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),
                *("prometheus", "--config.file=config.yml", "--storage.tsdb.path=data"),
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            folder,
        )

    def __enter__(self) -> PrometheusServer:
        try:
            self._job.wait_for("Server is ready to receive web requests", timeout_s=TIMEOUT_S)
        except BaseException:
            self._job.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._job.__exit__(*exc)

    @property
    def log(self) -> str:
        return self._job.err

    def get(self, path: str, **parameters: str) -> object:
        """The data of an answer of the API; AssertionError with its error."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=LIMIT_S
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def query(self, expr: str) -> Samples:
        """Values now, by labels without __name__."""
        data = self.get("query", query=expr)
        assert isinstance(data, dict)
        return {
            tuple(sorted((name, value) for name, value in each["metric"].items() if name != "__name__")): float(each["value"][1])
            for each in data["result"]
        }

    def wait_for(self, expr: str, enough: Callable[[Samples], object] = bool, timeout_s: float = TIMEOUT_S) -> Samples:
        """Wait until these values are enough, by default any; return them."""
        found: Samples = {}

        def there() -> bool:
            nonlocal found
            return bool(enough(found := self.query(expr)))

        try:
            until(there, limit_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{expr}: {error}: {found}\n{self.log[-2000:]}") from None
        return found


def file_sd(folder: Path, job: str = "training") -> str:
    """The job of prometheus.yml that finds agents by their files."""
    return f"  - job_name: {job}\n    honor_labels: true\n    file_sd_configs: [{{files: ['{folder}/*.json']}}]\n"


def static(target: str, job: str = "static") -> str:
    return f"  - job_name: {job}\n    static_configs: [{{targets: ['{target}']}}]\n"


class AsText:
    """A server that asks another for its metrics as text, as a scraper does that knows no OpenMetrics."""

    def __init__(self, target: str) -> None:
        class Relay(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with urllib.request.urlopen(f"http://{target}{self.path}", timeout=LIMIT_S) as answer:
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers["Content-Type"])
                    self.end_headers()
                    self.wfile.write(answer.read())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
        self.target = f"127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> AsText:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
