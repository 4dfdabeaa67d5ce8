"""`kvtune check` as a user runs it: against pages of targets, and against a server that answers as Prometheus does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import typer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvtune_cli.check import check
from kvtune_dashboards import coverage
from kvtune_dashboards.alerts import alerts
from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.recording import RECORDING_RULES
from kvtune_dashboards.rendering import boards
from kvtune_telemetry.catalogue import BY_NAME
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.vocabulary import Role
from kvtune_tuning.export import Advice, exposition
from kvtune_tuning.names import BESIDE_KVTUNE

app = typer.Typer()
app.command()(check)
MODEL = "m"
DASHBOARDS = boards()
RULES = [rule.name for rule in RECORDING_RULES]
ALERTS = [alert.name for alert in alerts(RulesConfig())]


def others(*prefixes: str) -> str:
    """A page with a series of each name of vLLM or of the process that is asked for."""
    rules = [coverage.Rule(rule.name, rule.expr) for rule in RECORDING_RULES]
    alarms = [coverage.Rule(alert.name, alert.expr) for alert in alerts(RulesConfig())]
    needs = coverage.asked_for(DASHBOARDS, rules, alarms, BESIDE_KVTUNE)
    names = sorted({name for need in needs for name in need.names if name.startswith(prefixes)})
    bound = {name: ',le="1"' if name.endswith("_bucket") else "" for name in names}
    reason = {name: ',reason="deferred"' if name.endswith("_by_reason") else "" for name in names}
    return "".join(
        f'{name}{{model_name="{MODEL}",engine="0"{bound[name]}{reason[name]}}} 0\n'
        if name.startswith("vllm:")
        else f"{name} 1\n"
        for name in names
    )


def engine(role: Role) -> str:
    registry = CollectorRegistry()
    recorder = ConnectorRecorder(registry, model_name=MODEL, engine="0", role=role)
    for label in BY_NAME["kvtune_connector_setting"].labels:
        for setting in label.values or ():
            recorder.set_setting(setting, 1)
    return generate_latest(registry).decode() + others("vllm:", "process_")


def router() -> str:
    registry = CollectorRegistry()
    recorder = RouterRecorder(registry, version="1")
    for setting in BY_NAME["kvtune_router_setting"].labels[0].values or ():
        recorder.set_setting(setting, 1)
    page = generate_latest(registry).decode() + others("process_")
    # What the router says of the engines it is configured with.
    for role in ("prefill", "decode"):
        labels = f'engine="http://{role}",role="{role}"'
        page += f"kvtune_engine_up{{{labels}}} 1\nkvtune_engine_restarts_total{{{labels}}} 0\n"
        for result in ("ok", "refused", "failed", "cancelled"):
            page += f'kvtune_engine_requests_total{{{labels},result="{result}"}} 0\n'
    return page


@dataclass
class Web:
    """Pages of targets, and a server with Prometheus' API under `/prometheus`."""

    url: str = ""
    pages: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, str]] = field(default_factory=list)
    """What Prometheus has, by label set, `__name__` among them."""
    rules: list[str] | None = None
    asked: list[str] = field(default_factory=list)

    def scrape(self, **pages: str) -> None:
        """Have Prometheus hold these targets' pages, by job."""
        for job, page in pages.items():
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    self.rows.append({**sample.labels, "__name__": sample.name, "job": job, "instance": f"{job}:1"})
            self.rows.append({"__name__": "up", "job": job, "instance": f"{job}:1"})

    def query(self, text: str) -> list[dict[str, Any]]:
        match = re.fullmatch(r'count by \((.*?)\) \(\{__name__=~"(.*?)"(?:,(\w+)!="")?\}\)', text)
        assert match is not None, text
        by, names = match[1].split(", "), set(match[2].split("|"))
        rows = [row for row in self.rows if row["__name__"] in names and (not match[3] or row.get(match[3]))]
        groups = {tuple((label, row[label]) for label in by if row.get(label)) for row in rows}
        return [{"metric": dict(group), "value": [0, "1"]} for group in groups]


@pytest.fixture
def web() -> Iterator[Web]:
    state = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
            parts = urlsplit(self.path)
            kind, page, status = "text/plain", state.pages.get(parts.path), 200
            if page is None and parts.path == "/prometheus/api/v1/query":
                (text,) = parse_qs(body)["query"]
                state.asked.append(text)
                result = {"resultType": "vector", "result": state.query(text)}
                kind, page = "application/json", json.dumps({"status": "success", "data": result})
            elif page is None and parts.path == "/prometheus/api/v1/rules" and state.rules is not None:
                assert self.command == "GET", "Prometheus refuses others"
                groups = [{"name": "g", "rules": [{"name": name} for name in state.rules]}]
                kind, page = "application/json", json.dumps({"status": "success", "data": {"groups": groups}})
            elif page is None:
                page, status = "<html>nothing here</html>", 401 if parts.path == "/private" else 404
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(page.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    advice = exposition(Advice(1.0, True, 1.0))
    return {"router": router(), "prefill": engine(Role.PREFILL), "decode": engine(Role.DECODE), "suggest": advice}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def targets(web: Web, pages: dict[str, str], *jobs: str) -> list[str]:
    """The options that name these targets."""
    web.pages = {f"/{job}": pages[job] for job in pages}
    return [part for job in jobs for part in ("--metrics", f"{web.url}/{job}")]


def test_all_is_answered_by_a_whole_deployment(web: Web, pages: dict[str, str]) -> None:
    code, out, err = run(*targets(web, pages, *pages))
    assert code == 0 and err == "", out
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * (len(DASHBOARDS) + 3)
    assert f"alerts: {len(set(ALERTS))} of {len(set(ALERTS))} answered" in out
    assert f"recording rules: {len(set(RULES))} of {len(set(RULES))} answered" in out


@pytest.mark.parametrize(
    ("without", "emitters", "told"),
    [
        ("router", {"router"}, "add --metrics of its metrics port (9400"),
        ("suggest", {"suggest"}, "kvtune suggest --watch"),
        ("decode", {"connector"}, "No decode engine among the engines"),
    ],
)
def test_what_is_not_given_is_named_with_what_to_do(
    web: Web, pages: dict[str, str], without: str, emitters: set[str], told: str
) -> None:
    given = targets(web, pages, *(job for job in pages if job != without))
    code, out, _ = run(*given, "--format", "json")
    made = json.loads(out)
    assert code == 1 and made["answered"] is False and made["schema"] == "kvtune.check/1"
    groups = {group["emitter"]: group for group in made["missing"]}
    assert set(groups) >= emitters and told in groups[without if without != "decode" else "connector"]["advice"]
    for group in made["missing"]:
        for gap in group["missing"]:
            assert gap["used_by"] and gap["why"] in ("absent", "value", "label")
    unanswered = [item for item in made["items"] if not item["answered"]]
    assert sum(kind["asked"] - kind["answered"] for kind in made["summary"].values()) == len(unanswered) > 0
    code, out, _ = run(*given)
    assert code == 1 and told in out and "NOT " in out


def test_stock_engines_are_told_from_none(web: Web, pages: dict[str, str]) -> None:
    web.pages["/stock"] = others("vllm:")
    code, out, _ = run(*targets(web, pages, "router"), "--metrics", f"{web.url}/router")
    assert code == 1 and "/metrics of every prefill and decode engine" in out
    given = targets(web, pages, "router")
    web.pages["/stock"] = others("vllm:")
    code, out, _ = run(*given, "--metrics", f"{web.url}/stock")
    assert code == 1 and "vLLM is there without kvtune's connector" in out


# --- Prometheus -----------------------------------------------------------------------------------------------------


def test_a_prometheus_with_all_targets_and_rules_answers_all(web: Web, pages: dict[str, str]) -> None:
    web.scrape(**pages)
    web.rules = [*RULES, *ALERTS]
    code, out, err = run("--prometheus", f"{web.url}/prometheus")
    assert code == 0 and err == "", out
    for text in web.asked:
        by = text[text.index("(") + 1 : text.index(")")].split(", ")
        assert not {"engine", "instance", "le", "model_name", "version"} & set(by), "no label that grows with the fleet"


def test_rules_that_are_not_loaded_are_one_thing_to_do(web: Web, pages: dict[str, str]) -> None:
    web.scrape(**pages)
    web.rules = []
    code, out, _ = run("--prometheus", f"{web.url}/prometheus", "--format", "json")
    made = json.loads(out)
    assert code == 1 and [group["emitter"] for group in made["missing"]] == ["rules"]
    gaps = made["missing"][0]["missing"]
    assert {gap["why"] for gap in gaps} == {"not_loaded"}
    assert {gap["series"] for gap in gaps} == {*RULES, *ALERTS}
    assert made["summary"]["suggest"]["answered"] == made["summary"]["suggest"]["asked"]
    assert made["sources"] == {"metrics": [], "prometheus": f"{web.url}/prometheus"}


def test_a_store_that_evaluates_no_rules_is_asked_for_their_results(web: Web, pages: dict[str, str]) -> None:
    web.scrape(**pages)
    web.rows += [{"__name__": name, "job": "router"} for name in RULES]
    code, out, _ = run("--prometheus", f"{web.url}/prometheus")
    assert code == 0, out


def test_a_target_that_is_exposed_and_not_scraped(web: Web, pages: dict[str, str]) -> None:
    web.scrape(**{job: page for job, page in pages.items() if job != "router"})
    web.rules = [*RULES, *ALERTS]
    code, out, _ = run("--prometheus", f"{web.url}/prometheus", *targets(web, pages, "router"))
    assert code == 1 and "kvtune_turns_total (exposed, but not in Prometheus)" in out
    assert "have Prometheus scrape its metrics port (9400" in out


def test_names_stored_without_their_colon_get_a_rule_that_puts_it_back(web: Web, pages: dict[str, str]) -> None:
    web.scrape(**{job: page.replace("vllm:", "vllm_") for job, page in pages.items()})
    web.rules = [*RULES, *ALERTS]
    code, out, _ = run("--prometheus", f"{web.url}/prometheus")
    assert code == 1 and "vllm:kv_cache_usage_perc (it is there as vllm_kv_cache_usage_perc)" in out
    assert "replacement: 'vllm:$1'" in out


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "error", "told"),
    [
        (("--metrics", "ftp://h"), 2, "bad_url", "Give e.g. --metrics http://router:9400/metrics"),
        (("--metrics", "http://127.0.0.1:1/metrics"), 1, "unreachable", "Check that the target is up"),
        (("--prometheus", "http://127.0.0.1:1"), 1, "unreachable", "Check the address"),
        (("--prometheus", "ftp://h"), 2, "bad_url", "--prometheus"),
        (("--metrics", "h:1", "--timeout", "soon"), 2, "bad_duration", "Write e.g. 90s"),
        (("--metrics", "h:1", "--header", "token"), 2, "bad_header", "X-Scope-OrgID"),
        (("--metrics", "h:1", "--bearer-token-file", "/nonexistent"), 2, "bad_file", "Give a file"),
    ],
)
def test_failures_are_json_too(arguments: tuple[str, ...], code: int, error: str, told: str) -> None:
    got, out, err = run(*arguments, "--format", "json")
    made = json.loads(out)
    assert (got, made["schema"], made["error"]["code"]) == (code, "kvtune.check/1", error)
    assert told in made["error"]["hint"]
    assert err == f"kvtune: {made['error']['message']}\n{made['error']['hint']}\n"
    got, out, err = run(*arguments)
    assert got == code and out == "" and told in err


def test_pages_that_are_no_metrics(web: Web) -> None:
    web.pages = {"/html": "<html>log in</html>", "/node": "node_load1 1\n", "/empty": ""}
    for path in (*web.pages, "/nothing", "/private"):
        code, out, err = run("--metrics", f"{web.url}{path}")
        assert code == 1 and out == "" and f"{web.url}{path}" in err, err
        assert len(err.splitlines()) == 2
    assert "--bearer-token-file" in run("--metrics", f"{web.url}/private")[2]


def test_secrets_are_not_printed() -> None:
    for option in ("--metrics", "--prometheus"):
        _, out, err = run(option, "http://me:hunter2@127.0.0.1:1", "--format", "json")
        assert "hunter2" not in out + err


def test_nothing_to_check_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, web: Web, pages: dict[str, str]) -> None:
    code, out, err = run()
    assert code == 2 and out == "" and "--metrics URL" in err
    assert run("--format", "xml", "--metrics", "h")[0] == 2
    web.scrape(**pages)
    monkeypatch.setenv("KVTUNE_PROMETHEUS_URL", f"{web.url}/prometheus")
    code, out, _ = run("--format", "json")
    assert code == 1 and json.loads(out)["sources"]["prometheus"] == f"{web.url}/prometheus"


def test_the_command_is_registered(tmp_path: Path) -> None:
    import subprocess
    import sys

    for arguments, flag in ((["check"], "--metrics"), (["dashboards", "push"], "--dry-run")):
        ran = subprocess.run(
            [sys.executable, "-m", "kvtune_cli", *arguments, "--help"],
            capture_output=True, text=True, cwd=tmp_path, check=True,
        )  # fmt: skip
        assert flag in ran.stdout
