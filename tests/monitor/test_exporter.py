"""The pages and the webhook; alert rules and dashboard against a real Prometheus where it is
installed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from assay.errors import UsageError
from assay.monitor.alarms import ALARMS
from assay.monitor.canary import State
from assay.monitor.exporter import Exporter, parse_listen
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from assay.monitor.status import status_of
from assay.monitor.webhook import Webhook
from assay.serving.launch import free_port
from monitor.watched import Clock, Replayed
from stub_server import StubServer, status

EXAMPLES = Path(__file__).parents[2] / "examples" / "watch"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def watch(rounds: int = 60, url: str = "http://user:secret@127.0.0.1:9", **options: Any) -> Watch:
    clock = Clock()
    found = Watch(
        url, WatchOptions(listen="none", **options), Replayed(clock), clock=clock, wall=time.time
    )  # type: ignore[arg-type]
    for _ in range(rounds):
        found.step()
        clock.now += 60
    return found


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def test_the_pages_say_what_the_watch_knows() -> None:
    watched = watch()
    with Exporter("127.0.0.1:0", partial(status_of, watched)) as exporter:
        root = f"http://127.0.0.1:{exporter.port}"
        page = httpx.get(f"{root}/metrics")
        assert (
            page.headers["content-type"].startswith("text/plain; version=0.0.4")
            and "secret" not in page.text
        )
        samples = {
            (s.name, *s.labels.values()): s.value
            for f in text_string_to_metric_families(page.text)
            for s in f.samples
        }
        assert samples["assay_watch_state", "ok"] == 1 and samples["assay_watch_state", "down"] == 0
        assert samples["assay_watch_rounds_total", "ok"] == 60
        assert (
            samples["assay_watch_alarm", "broken"] == 0 and samples[("assay_watch_learning",)] == 0
        )
        assert 0 < samples[("assay_watch_detection_seconds",)] <= 3600
        assert httpx.get(f"{root}/healthz").status_code == 200
        assert httpx.get(f"{root}/health_generate").json()["state"] == "ok"
        assert httpx.get(f"{root}/nothing").status_code == 404
        assert httpx.post(f"{root}/metrics").status_code == 501
        # Sane text of another model still generates; garbage does not. A watch that stands still is
        # not healthy.
        watched.state = "changed"
        assert httpx.get(f"{root}/health_generate").status_code == 200
        watched.state = "broken"
        assert httpx.get(f"{root}/health_generate").status_code == 503
        watched.clock.now += 1e6  # type: ignore[attr-defined]
        assert httpx.get(f"{root}/healthz").status_code == 503
        with pytest.raises(UsageError, match="cannot listen"):
            Exporter(f"127.0.0.1:{exporter.port}", partial(status_of, watched))


@pytest.mark.parametrize(
    "text, parsed",
    [("9", ("127.0.0.1", 9)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:8", ("::1", 8))],
)
def test_where_to_listen(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed
    for wrong in ("", "x", "h:99999", "h:-1"):
        with pytest.raises(UsageError):
            parse_listen(wrong)


def test_a_webhook_gets_every_alarm_and_its_failures_are_counted() -> None:
    with StubServer() as stub:
        stub.on("POST /hook", lambda e: e.json({}))
        watched = watch(40, webhook=f"{stub.url}/hook")
        watched.log.raise_alarm("broken", "it writes !!!!")
        assert watched.webhook is not None
        watched.webhook.flush(10)
        (alarm,) = (b for b in stub.bodies("POST /hook") if b["kind"] == "alarm")
        assert (
            alarm["alarm"] == "broken"
            and "!!!!" in alarm["text"]
            and "secret" not in json.dumps(alarm)
        )
        stub.on("POST /hook", status(500))
        hook = Webhook(f"{stub.url}/hook", pause=0.01)
        hook.post({"a": 1})
        hook.flush(10)
        assert hook.failures == 1


def test_a_webhook_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Webhook, "_sent", lambda self, message, attempt: time.sleep(60) or False)
    hook = Webhook("http://127.0.0.1:9/x")
    began = time.monotonic()
    for n in range(500):
        hook.post({"n": n})
    assert time.monotonic() - began < 5 and hook.failures >= 398


def test_promtool_accepts_the_page(tmp_path: Path) -> None:
    with Exporter("127.0.0.1:0", partial(status_of, watch())) as exporter:
        page = httpx.get(f"http://127.0.0.1:{exporter.port}/metrics").content
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, (
        done.stdout + done.stderr
    ).decode()


def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    promtool = tool("promtool")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_name_metrics_and_alarms_that_exist() -> None:
    with Exporter("127.0.0.1:0", partial(status_of, watch())) as exporter:
        page = httpx.get(f"http://127.0.0.1:{exporter.port}/metrics").text
    known = {s.name for f in text_string_to_metric_families(page) for s in f.samples}
    known |= {"assay_watch_queue_length", "assay_watch_acceptance_ratio"}  # of servers that tell
    for name in ("alerts.yml", "dashboard.json"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        used = set(re.findall(r"assay_watch_\w+", text))
        assert used and used <= known
        assert set(re.findall(r'alarm=\\?"([\w.]+)\\?"', text)) <= set(ALARMS)
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == 10
    unit = (EXAMPLES / "assay-watch.service").read_text(encoding="utf-8")
    assert "assay watch http" in unit


@contextlib.contextmanager
def scraping(watched: Watch, folder: Path) -> Iterator[str]:
    """A real Prometheus with the example's settings that scrapes a watch; the URL of its API."""
    binary, port = tool("prometheus"), free_port()
    with Exporter("127.0.0.1:0", partial(status_of, watched)) as exporter:
        config = (
            (EXAMPLES / "prometheus.yml")
            .read_text()
            .replace("127.0.0.1:9877", f"127.0.0.1:{exporter.port}")
        )
        (folder / "prometheus.yml").write_text(config.replace("30s", "1s"))
        shutil.copy(EXAMPLES / "alerts.yml", folder)
        command = [
            binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield f"http://127.0.0.1:{port}/api/v1"
            finally:
                process.terminate()


@pytest.mark.engine
def test_a_real_prometheus_scrapes_the_watch_and_raises_the_alert(tmp_path: Path) -> None:
    watched = watch()
    with scraping(watched, tmp_path) as api:
        assert until(lambda: value(api, 'assay_watch_state{state="ok"}')) == "1"
        watched.log.raise_alarm("broken", "garbage")
        names = until(
            lambda: [a["labels"]["alertname"] for a in get(api, "/alerts").get("alerts", ())]
        )
        assert names == ["ModelServerGarbage"]


@pytest.mark.engine
def test_every_query_of_the_dashboard_and_the_rules_has_an_answer(tmp_path: Path) -> None:
    """Each is asked of a real Prometheus that has scraped a watch: an answer with values, or one
    that is empty by design.
    """
    watched = watch()
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text(encoding="utf-8"))
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    rules = re.findall(r"expr: (.+)", (EXAMPLES / "alerts.yml").read_text(encoding="utf-8"))
    assert len(shown) >= 10 and len(rules) == 8
    with scraping(watched, tmp_path) as api:
        assert until(lambda: value(api, 'assay_watch_state{state="ok"}')) == "1"
        watched.log.raise_alarm("broken", "garbage")
        assert until(lambda: value(api, 'assay_watch_alarm{alarm="broken"}') == "1")
        empty = []
        for expr in (*shown, *rules):
            query = re.sub(r"\$\w+|\[\[\w+\]\]", ".*", expr)
            answer = httpx.get(f"{api}/query", params={"query": query}, timeout=60).json()
            assert answer["status"] == "success", (expr, answer)
            if not answer["data"]["result"]:
                empty.append(expr)
        quiet = {"assay_watch_queue_length", "assay_watch_acceptance_ratio"}  # of servers that tell
        assert all(e in rules or any(name in e for name in quiet) for e in empty), empty


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "assay-watch.service").read_text(encoding="utf-8")
    here = Path(sys.executable)  # its own place of assay is that of the machine it is for
    (tmp_path / "assay-watch.service").write_text(text.replace("/usr/local/bin/assay", str(here)))
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", str(tmp_path / "assay-watch.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wrong = text.replace("/usr/local/bin/assay", str(here)).replace(
        "Restart=always", "Restart=sometimes"
    )
    (tmp_path / "assay-watch.service").write_text(wrong)
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", str(tmp_path / "assay-watch.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "restart specifier" in done.stdout + done.stderr  # so it does look


def test_the_dockerfile_follows_the_rules_of_hadolint() -> None:
    """Of its rules those that apply: a tag, no root, pinned packages, no cache, no ADD, commands as
    lists, one of each.
    """
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    by = {}
    for name, rest in lines:
        by.setdefault(name, []).append(rest)
    known = {"FROM", "ARG", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    assert set(by) == known and lines[0][0] == "FROM"
    image, tag = by["FROM"][0].split(":")
    assert image == "python" and re.fullmatch(r"3\.\d+-slim", tag)
    assert by["USER"] == ["assay"] and text.index("USER") < text.index("ENTRYPOINT")
    version = re.search(
        r'^version = "(.+)"', (EXAMPLES.parents[1] / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert version is not None and by["ARG"] == [f"VERSION={version.group(1)}"]
    assert "--no-cache-dir" in by["RUN"][0] and '"llm-assay==${VERSION}"' in by["RUN"][0]
    assert json.loads(by["ENTRYPOINT"][0])[:2] == ["assay", "watch"] and len(by["ENTRYPOINT"]) == 1
    assert json.loads(by["HEALTHCHECK"][0].removeprefix("CMD "))[0] == "python"
    port = int(by["EXPOSE"][0])
    assert (
        parse_listen(json.loads(by["ENTRYPOINT"][0])[-1])[1] == port
        and f":{port}/healthz" in by["HEALTHCHECK"][0]
    )


def get(api: str, path: str) -> dict[str, Any]:
    try:
        return httpx.get(api + path, timeout=30).json().get("data") or {}
    except (httpx.HTTPError, ValueError):
        return {}


def value(api: str, query: str) -> str | None:
    found = get(api, f"/query?query={query}").get("result")
    return found[0]["value"][1] if found else None


def until(ask: Any, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := ask()) and time.monotonic() < end:
        time.sleep(0.3)
    return found


def test_states_are_the_words_of_the_exporter() -> None:
    assert {s.value for s in State} < set(status_of(watch(1))["states"])


def test_the_pages_are_served_on_an_address_of_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Exporter("[::1]:0", partial(status_of, watch())) as exporter:
        answer = httpx.get(f"http://[::1]:{exporter.port}/healthz")
    assert answer.status_code == 200
