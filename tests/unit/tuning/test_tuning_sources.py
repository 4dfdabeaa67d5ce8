"""Reading and writing: expositions, snapshot directories, live targets, Prometheus; and every way they fail."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import pytest

from kvtune_telemetry.catalogue import BY_NAME
from kvtune_telemetry.clock import ScaledClock, SystemClock
from kvtune_tuning.access import Access
from kvtune_tuning.api import suggest_snapshots
from kvtune_tuning.document import exit_code, schema
from kvtune_tuning.errors import NOT_ENOUGH_DATA, TuningError, UsageError
from kvtune_tuning.exposition import check_known, parse
from kvtune_tuning.names import CATALOGUED, VLLM
from kvtune_tuning.recording import SnapshotWriter, http_fetch, names_of, normalise, record, target_name
from kvtune_tuning.render import render_table
from kvtune_tuning.sources import read_snapshots, scrape_live

Snapshots = Callable[..., Path]
PAGE = 'kvtune_turns_total{outcome="first"} 3.0\nkvtune_turn_ends_total 3.0\n'


# --- names ----------------------------------------------------------------------------------------------------------


def test_every_series_that_is_read_is_catalogued() -> None:
    known = {sample for metric in BY_NAME.values() for sample in metric.sample_names()}
    assert set(CATALOGUED) <= known
    assert all(name.startswith("vllm:") for name in VLLM)


# --- exposition -----------------------------------------------------------------------------------------------------


def test_needed_samples_are_kept_and_others_skipped() -> None:
    text = (
        "# HELP kvtune_turns_total x\n# TYPE kvtune_turns_total counter\n"
        'kvtune_turns_total{outcome="hit"} 4\n'
        'vllm:lora_requests_info{finished_reason="stop, \\"odd\\" } 1"} 9\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="a b, {c}"} 0.5 1700000000000\n'
        'kvtune_turn_gap_seconds_bucket{le="+Inf"} 7 # {trace_id="a1"} 0.4 1700000000.5\n'
        "go_goroutines 12\n# EOF\n"
    )
    samples = {s.name: s for s in parse(text, "x").samples}
    assert set(samples) == {"kvtune_turns_total", "vllm:kv_cache_usage_perc", "kvtune_turn_gap_seconds_bucket"}
    assert dict(samples["vllm:kv_cache_usage_perc"].labels)["model_name"] == "a b, {c}"
    assert samples["kvtune_turn_gap_seconds_bucket"].value == 7


def test_names_without_their_colon_are_vllms() -> None:
    text = 'vllm_num_requests_waiting{engine="0"} 2\nvllm_lora_requests_info 1\n'
    assert [(s.name, s.value) for s in parse(text, "x").samples] == [("vllm:num_requests_waiting", 2)]
    check_known(text, "x")
    both = f'{text}vllm:num_requests_waiting{{engine="0"}} 3\nvllm_num_requests_waiting{{engine="1"}} 4\n'
    assert [s.value for s in parse(both, "x").samples] == [3, 4], "what is there twice counts once"
    asked = {"vllm_num_requests_waiting", "vllm:num_requests_waiting"}
    assert [s.name for s in parse(text, "x", asked).samples] == ["vllm_num_requests_waiting"], "asked for by that name"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "nan"])
def test_values_that_are_no_numbers_are_dropped_and_counted(value: str) -> None:
    parsed = parse(f"kvtune_retained_tokens {value}\nkvtune_turn_ends_total 1\n", "x")
    assert [s.name for s in parsed.samples] == ["kvtune_turn_ends_total"] and parsed.not_finite == 1


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>404</body></html>",
        '{"status": "ok"}',
        "hello world, this is prose\n",
        "kvtune_turns_total{outcome=hit} 1\n",
        'kvtune_turns_total{outcome="hit"} many\n',
        "kvtune_turns_total\n",
        "kvtune_turns_total 1 2 3\n",
        "\x00\x01\x02",
    ],
)
def test_what_is_no_exposition_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(TuningError) as caught:
        parse(text, "http://h/metrics")
    assert caught.value.code == "not_an_exposition"
    assert "http://h/metrics, line 1" in caught.value.message and caught.value.hint


def test_an_empty_page_is_an_exposition_without_samples() -> None:
    assert parse("", "x").samples == () and parse("# only a comment\n", "x").samples == ()


# --- snapshots ------------------------------------------------------------------------------------------------------


def failed(document: dict, code: str) -> dict:
    jsonschema.validate(document, schema())
    assert document["error"]["code"] == code, document["error"]
    assert exit_code(document) == (3 if code in NOT_ENOUGH_DATA else 1)
    return document["error"]


def test_a_missing_directory(tmp_path: Path) -> None:
    error = failed(suggest_snapshots(tmp_path / "none"), "no_such_directory")
    assert str(tmp_path / "none") in error["message"]


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "kvtune record" in failed(suggest_snapshots(tmp_path), "empty_snapshot")["hint"]


def test_a_file_without_a_time_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "router.prom").write_text(PAGE)
    assert "router.prom" in failed(suggest_snapshots(tmp_path), "bad_file_name")["message"]


@pytest.mark.parametrize("ms", [900_000_000_000_000, 9_000_000_000_001])
def test_a_file_of_no_time_there_is(tmp_path: Path, ms: int) -> None:
    (tmp_path / "1000-router.prom").write_text(PAGE)
    (tmp_path / f"{ms}-router.prom").write_text(PAGE)
    assert f"{ms} is no time" in failed(suggest_snapshots(tmp_path), "bad_file_name")["message"]


def test_a_file_that_is_no_exposition(tmp_path: Path) -> None:
    (tmp_path / "1000-router.prom").write_text("<html>")
    assert "1000-router.prom" in failed(suggest_snapshots(tmp_path), "not_an_exposition")["message"]
    (tmp_path / "1000-router.prom").write_bytes(b"\xff\xfe\x00k")
    failed(suggest_snapshots(tmp_path), "not_an_exposition")


def test_one_scrape_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "1000-router.prom").write_text(PAGE)
    failed(suggest_snapshots(tmp_path), "window_too_short")


def test_nothing_of_kvtune(tmp_path: Path) -> None:
    for ms in (1000, 2000):
        (tmp_path / f"{ms}-x.prom").write_text("up 1\n")
    failed(suggest_snapshots(tmp_path), "no_kvtune_series")


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for ms in (1000, 61_000):
        (tmp_path / f"{ms}-router.prom").write_text(PAGE)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / ".half.prom").write_text("<")
    (tmp_path / "odd.prom").write_text("<")
    document = suggest_snapshots(tmp_path)
    jsonschema.validate(document, schema())
    assert document["window"]["seconds"] == 60
    assert any("odd.prom" in check["message"] for check in document["checks"])


def test_nan_gauges_do_not_get_into_the_document(snapshots: Snapshots, tmp_path: Path) -> None:
    for file in snapshots(pool=1_500_000, interval=600.0).iterdir():
        lines = file.read_text().splitlines()
        lines = [
            f"{x.rsplit(' ', 1)[0]} NaN" if x.startswith(("kvtune_retained", "vllm:kv_cache")) else x for x in lines
        ]
        (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    document = suggest_snapshots(tmp_path)
    jsonschema.validate(document, schema())
    json.dumps(document, allow_nan=False)
    assert document["evidence"]["samples_dropped"] > 0
    assert {"not_finite"} <= {c["code"] for c in document["checks"]}
    assert document["recommendations"][0]["reason_code"] == "missing_series"


IMPLAUSIBLE = [
    ("vllm:kv_cache_usage_perc", "-1e18"),
    ("vllm:kv_cache_usage_perc", "-0.01"),
    ("vllm:kv_cache_usage_perc", "1.51"),
    ("vllm:kv_cache_usage_perc", "97.5"),
    ("vllm:num_requests_waiting", "-1"),
    ('kvtune_retained_tokens{engine="d0"', "-1e18"),
    ('kvtune_retained_tokens{engine="d0"', "1e30"),
    ('kvtune_retained_requests{engine="d0"', "-3"),
    ("kvtune_conversations_remembered", "-1e18"),
    ("kv_pool_tokens", "-1500000"),
    ("kv_pool_tokens", "1e300"),
    ("decoder_kv_blocks_ttl", "-480"),
    ("kv_recompute_threshold", "-1"),
    ("kvtune_turn_ends_total", "-1e18"),
    ("kvtune_turn_ends_total", "1e-150"),
    ("kvtune_turn_end_tokens_total", "1e290"),
    ('kvtune_path_seconds_total{engine="p0"', "1e290"),
    ('kvtune_path_observations_total{engine="p0"', "1e-30"),
]


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize(("name", "value"), IMPLAUSIBLE)
def test_values_that_cannot_be_are_left_out_and_said(
    snapshots: Snapshots, tmp_path: Path, name: str, value: str, always: bool
) -> None:
    """`always`: in every scrape; else in one, which must not change what is advised."""
    source = snapshots(pool=1_500_000, interval=600.0)
    spoilt = 0
    for k, file in enumerate(sorted(source.iterdir())):
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            if line.startswith(name) or f'"{name}"' in line:
                spoil = always or 9 <= k <= 11
                lines[i] = f"{line.rsplit(' ', 1)[0]} {value}" if spoil else line
                spoilt += spoil
        (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    assert spoilt
    document = suggest_snapshots(tmp_path)
    jsonschema.validate(document, schema())
    told = [check["message"] for check in document["checks"] if check["code"] == "implausible"]
    assert len(told) == 1 and name.split("{")[0] in told[0], told
    assert document["evidence"]["samples_dropped"] == spoilt
    facts, (advice, _) = document["evidence"], document["recommendations"]
    for number in (facts["kv_usage_p99"], facts["active_tokens_mean"], facts["retained_tokens_mean"], facts["turns"]):
        assert number is None or 0 <= number < 1e12
    assert "e+" not in advice["reason"] and "-1" not in advice["reason"]
    if not always:
        whole = suggest_snapshots(source)["recommendations"][0]
        assert (advice["status"], advice["current"]) == (whole["status"], whole["current"])
    elif name == "vllm:kv_cache_usage_perc":
        assert advice["reason_code"] == "missing_series" and facts["kv_usage_p99"] is None
    elif name == "kv_pool_tokens":
        assert advice["reason_code"] == "missing_series" and facts["pool_tokens"] is None
    elif name == "decoder_kv_blocks_ttl":
        assert advice["current_assumed"] and advice["current"] == 480


def test_a_usage_that_rounds_above_one_is_kept(snapshots: Snapshots, tmp_path: Path) -> None:
    for file in snapshots(pool=1_500_000, interval=600.0).iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace('"m"} 1.0\n', '"m"} 1.02\n'))
    document = suggest_snapshots(tmp_path)
    assert document["evidence"]["kv_usage_p99"] == 1.02
    assert "implausible" not in {check["code"] for check in document["checks"]}


def test_hints_name_the_routers_own_metrics_port(tmp_path: Path) -> None:
    from kvtune_router.config import RouterConfig

    port = str(RouterConfig.__dataclass_fields__["metrics_port"].default)
    with pytest.raises(UsageError) as bad_url:
        normalise("ftp://x")
    with pytest.raises(TuningError) as junk:
        parse("<html>", "x")
    with pytest.raises(TuningError) as stranger:
        check_known("up 1\n", "x")
    hints = [suggest_snapshots(tmp_path)["error"]["hint"], *(e.value.hint for e in (bad_url, junk, stranger))]
    assert all(f"{port}" in hint and "9100" not in hint for hint in hints), hints


@pytest.mark.parametrize(
    ("page", "code"),
    [
        ("up 1\n", "no_known_series"),
        ("", "no_known_series"),
        ("# HELP kvtune_turns_total x\n", "no_known_series"),
        ("my_kvtune_turns_total 1\n", "no_known_series"),
        ('{"status": "ok"}', "not_an_exposition"),
        ("vllm:num_requests_waiting soon\n", "not_an_exposition"),
        ("kvtune_build_info 1\n", None),
        ('vllm:request_success_total{a="b"} 1\n', None),
        (PAGE, None),
    ],
)
def test_pages_of_ours_are_known(page: str, code: str | None) -> None:
    try:
        check_known(page, "http://h/health")
    except TuningError as error:
        assert error.code == code and error.message.startswith("http://h/health") and error.hint
    else:
        assert code is None


async def test_a_target_that_turns_into_something_else_is_a_failed_scrape(tmp_path: Path) -> None:
    """A proxy that answers for an engine that restarts must not end a long recording, nor get into it."""
    calls = 0

    async def fetch(_: str) -> str:
        nonlocal calls
        calls += 1
        return "<html>503</html>" if calls == 2 else PAGE

    clock = ScaledClock.starting_now(1000.0)
    done = await record(["r:1"], tmp_path, clock, 50.0, asyncio.Event(), duration_s=150.0, fetch=fetch)
    assert done.snapshots == done.rounds - 1 and done.failures == {"r_1": 1}
    assert read_snapshots(tmp_path).increase("kvtune_turns_total") == 0


async def test_the_time_of_a_simulation_is_said_to_be_one(snapshots: Snapshots, tmp_path: Path) -> None:
    async def fetch(_: str) -> str:
        return PAGE

    for scale, model_time in ((1000.0, True), (1.0, False)):
        clock = ScaledClock.starting_now(scale)
        directory = tmp_path / f"{scale:g}"
        duration = 0.2 * scale
        await record(["r:1"], directory, clock, duration, asyncio.Event(), duration_s=duration, fetch=fetch)
        document = suggest_snapshots(directory)
        jsonschema.validate(document, schema())
        assert document["window"]["model_time"] is model_time
        assert ("model time" in render_table(document)) is model_time
        live = await scrape_live(
            ["r:1"], clock, interval_s=duration, duration_s=duration, stop=asyncio.Event(), fetch=fetch
        )
        assert (live.ahead_s > 10) is model_time
        assert (live.last(1e9).ahead_s > 10) is model_time
    assert suggest_snapshots(snapshots(pool=1_500_000, interval=600.0))["window"]["model_time"] is False


def test_a_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "a" / "b")
    path = writer.write(1700000000.1234, "router_9100", PAGE)
    assert path.name == "1700000000123-router_9100.prom" and path.read_text() == PAGE
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == [path.name]


def test_a_writer_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningError) as caught:
        SnapshotWriter(tmp_path / "file")
    assert caught.value.code == "cannot_write" and "directory that can be written" in caught.value.hint


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "full", "name"),
    [
        ("host:9100", "http://host:9100/metrics", "host_9100"),
        ("http://host:9100/", "http://host:9100/metrics", "host_9100"),
        ("https://h/engine/metrics", "https://h/engine/metrics", "h_engine_metrics"),
        ("http://user:secret@h:1", "http://user:secret@h:1/metrics", "h_1"),
        ("http://[::1]:8", "http://[::1]:8/metrics", "1_8"),
    ],
)
def test_addresses(url: str, full: str, name: str) -> None:
    assert normalise(url) == full and target_name(url) == name
    assert "secret" not in target_name(url)


@pytest.mark.parametrize("url", [
    "", "ftp://x", "http://", "http://h:notaport", "http://h:99999", "file:///etc/passwd", "http://[::1", "http://a..b",
    "http://.foo", f"http://{70 * 'a'}", "http://xn--a", "http://me:pw@[bad",
])  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        normalise(url)
    assert caught.value.code == "bad_url" and "pw" not in caught.value.message


def test_targets_that_look_alike_stay_apart() -> None:
    named = names_of(["http://h:1/a-b", "http://h:1/a@b", "http://h:1/a-b"])
    assert len(named) == 2


async def test_recording_is_in_the_clocks_time_and_takes_a_last_round(tmp_path: Path) -> None:
    clock = ScaledClock.starting_now(600.0)
    stop = asyncio.Event()
    served = 0

    async def fetch(url: str) -> str:
        nonlocal served
        served += 1
        if "d:1" in url and served > 3:
            raise TuningError("unreachable", f"{url}: gone", "x")
        return f"kvtune_turns_total {served}\n"

    task = asyncio.create_task(record(["r:1", "d:1"], tmp_path, clock, 60.0, stop, fetch=fetch))
    await asyncio.sleep(0.35)
    stop.set()
    done = await asyncio.wait_for(task, 5)
    assert done.rounds >= 3
    assert done.failures.get("d_1", 0) >= 1 and "gone" in done.last_failure["d_1"], "one that fails does not end it"
    times = read_snapshots(tmp_path).scrapes["r_1"]
    assert len(times) == done.rounds
    steps = np.diff(times)[:-1]
    assert ((steps >= 30) & (steps <= 120)).all(), "a minute of model time, not 0.1 s of the wall's"
    assert read_snapshots(tmp_path).increase("kvtune_turns_total") is not None


async def test_recording_ends_after_its_duration(tmp_path: Path) -> None:
    async def fetch(_: str) -> str:
        return PAGE

    clock = ScaledClock.starting_now(1000.0)
    done = await record(["r:1"], tmp_path, clock, 50.0, asyncio.Event(), duration_s=100.0, fetch=fetch)
    assert done.rounds == 3 == done.snapshots


async def test_recording_nothing_that_answers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError) as caught:
        await record(["127.0.0.1:1"], tmp_path, SystemClock(), 1.0, asyncio.Event())
    assert caught.value.code == "unreachable" and "127.0.0.1:1" in caught.value.message


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (httpx.ConnectError("refused"), "refused", "up and reachable"),
        (httpx.ReadError(""), "ReadError", "up and reachable"),
        (UnicodeError("label too long"), "label too long", "up and reachable"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] x"), "VERIFY_FAILED", "--ca-file"),
    ],
)
async def test_targets_that_are_not_reached_say_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, hint: str
) -> None:
    def stream(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    async with http_fetch() as fetch:
        with pytest.raises(TuningError) as caught:
            await fetch("https://me:pw@h:1/metrics")
    assert caught.value.message.startswith("https://h:1/metrics: ") and words in caught.value.message
    assert caught.value.code == "unreachable" and hint in caught.value.hint and "pw" not in caught.value.message


async def _dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half a line of headers, or of a page, and then a byte at a time."""
    path = (await reader.readline()).split()[1]
    writer.write(b"HTTP/1.1 200 OK\r\n" + (b"x: " if path == b"/headers" else b"content-length: 100000\r\n\r\n"))
    try:
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)
    except OSError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["headers", "metrics"])
async def test_a_page_that_drips_is_given_up(path: str) -> None:
    server = await asyncio.start_server(_dripping, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{path}"
    async with http_fetch([url], Access(timeout_s=0.2)) as fetch:
        with pytest.raises(TuningError) as caught:
            await asyncio.wait_for(fetch(url), 30)
    server.close()
    assert (caught.value.code, caught.value.message) == ("timeout", f"{url}: no whole answer within 0.2 s")


async def test_a_page_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(65536 * b"#")
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    monkeypatch.setattr("kvtune_tuning.recording.MAX_PAGE_BYTES", 2**20)
    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    async with http_fetch([url]) as fetch:
        with pytest.raises(TuningError) as caught:
            await asyncio.wait_for(fetch(url), 30)
    server.close()
    assert (caught.value.code, caught.value.message) == ("answer_too_large", f"{url}: a page of more than 1 MiB")


async def test_one_that_does_not_answer_holds_up_neither_the_others_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtune_tuning.recording.LAST_S", 0.05)
    stop = asyncio.Event()
    served = {"r": 0, "d": 0}

    async def fetch(url: str) -> str:
        served["d" if "d:1" in url else "r"] += 1
        if "d:1" in url and served["d"] > 1:
            await asyncio.Event().wait()
        if served["r"] == 5:
            stop.set()
        return PAGE

    said: list[str] = []
    clock = ScaledClock.starting_now(1000.0)
    done = await asyncio.wait_for(
        record(["r:1", "d:1"], tmp_path, clock, 20.0, stop, fetch=fetch, complain=said.append), 30
    )
    assert served["d"] == 2, "it is not asked again before it has answered"
    assert served["r"] == done.rounds and done.snapshots == done.rounds + 1
    assert done.failures == {"d_1": 1}
    assert said == ["http://d:1/metrics: no whole answer before the end"] == list(done.last_failure.values())


async def test_a_stop_in_the_first_round_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune_tuning.recording.LAST_S", 0.05)
    stop = asyncio.Event()

    async def fetch(_: str) -> str:
        stop.set()
        await asyncio.Event().wait()
        return ""

    with pytest.raises(TuningError) as caught:
        await asyncio.wait_for(record(["d:1"], tmp_path, SystemClock(), 1.0, stop, fetch=fetch), 30)
    assert (caught.value.code, caught.value.message) == (
        "timeout", "http://d:1/metrics: no whole answer before the end",
    )  # fmt: skip


async def test_live_scrapes_name_the_target_that_exposes_something_else() -> None:
    async def fetch(_: str) -> str:
        return "<html>"

    with pytest.raises(TuningError) as caught:
        await scrape_live(["h:1"], SystemClock(), interval_s=1, duration_s=1, stop=asyncio.Event(), fetch=fetch)
    assert "http://h:1/metrics, line 1" in caught.value.message


@pytest.mark.parametrize("kind", [TuningError, UsageError])
def test_an_error_leaves_a_worker_process_whole(kind: type[TuningError]) -> None:
    there = pickle.loads(pickle.dumps(kind("code", "message", "hint")))
    assert type(there) is kind and there.as_dict() == {"code": "code", "message": "message", "hint": "hint"}
    assert str(there) == "message"
