"""The advice as gauges: what is exposed for which document, and the file and the server that expose it."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtune_telemetry.catalogue import BY_NAME, emitted_by
from kvtune_tuning import watch as watching
from kvtune_tuning.api import suggest_snapshots
from kvtune_tuning.document import failed, schema
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.export import SETTINGS, STATUSES, Advice, check_export, exposition, write_export
from kvtune_tuning.run import Question
from kvtune_tuning.watch import Watch, run_watch

Snapshots = Callable[..., Path]
TTL, THRESHOLD = "decoder_kv_blocks_ttl", "kv_recompute_threshold"
MADE = 1_700_000_000.25
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def recommendation(setting: str, status: str, **more: Any) -> dict[str, Any]:
    return {
        "setting": setting, "status": status, "unit": "seconds" if setting == TTL else "tokens", "current": 480,
        "current_assumed": False, "recommended": None, "interval": None, **more,
    }  # fmt: skip


def document(*recommendations: dict[str, Any]) -> dict[str, Any]:
    return {"recommendations": list(recommendations), "window": {"seconds": 3600}}


def read(text: str) -> Values:
    """Samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(values: Values, name: str) -> dict[str, float]:
    """Values of one metric by its setting (or `setting/status`)."""
    return {
        "/".join(v for _, v in labels): value for (n, labels), value in values.items() if n == f"kvtune_suggest_{name}"
    }


def in_force(values: Values) -> dict[str, str]:
    status = of(values, "status")
    assert set(status) == {f"{setting}/{one}" for setting in SETTINGS for one in STATUSES}
    assert set(status.values()) <= {0.0, 1.0}
    return dict(key.split("/") for key, value in status.items() if value == 1.0)  # type: ignore[misc]


def test_the_statuses_are_those_of_the_document() -> None:
    assert list(STATUSES) == schema()["$defs"]["recommendation"]["properties"]["status"]["enum"]
    assert list(SETTINGS) == schema()["$defs"]["recommendation"]["properties"]["setting"]["enum"]


def test_a_change_and_a_keep() -> None:
    made = document(
        recommendation(TTL, "change", recommended=360, interval=[300, 420.5]),
        recommendation(THRESHOLD, "keep", current=64, recommended=64),
    )
    values = read(exposition(Advice.of(made, MADE)))
    assert of(values, "recommended") == {TTL: 360.0, THRESHOLD: 64.0}
    assert of(values, "current") == {TTL: 480.0, THRESHOLD: 64.0}
    assert of(values, "interval_low") == {TTL: 300.0} and of(values, "interval_high") == {TTL: 420.5}
    assert in_force(values) == {TTL: "change", THRESHOLD: "keep"}
    assert of(values, "up") == {"": 1.0}
    assert of(values, "timestamp_seconds") == of(values, "last_success_timestamp_seconds") == {"": MADE}


def test_what_is_absent_is_left_out() -> None:
    made = document(
        recommendation(TTL, "off", current_assumed=True, interval=[15, None]), recommendation(THRESHOLD, "insufficient")
    )
    values = read(exposition(Advice.of(made, MADE)))
    assert of(values, "recommended") == {}
    assert of(values, "current") == {THRESHOLD: 480.0}, "a default that is only assumed is not in force"
    assert of(values, "interval_low") == {TTL: 15.0} and of(values, "interval_high") == {}
    assert in_force(values) == {TTL: "off", THRESHOLD: "insufficient"}


def test_too_little_data_is_an_answer_and_a_failure_is_none() -> None:
    little = failed(TuningError("no_series", "none", "wait"))
    values = read(exposition(Advice.of(little, MADE, last_success_s=MADE - 900)))
    assert in_force(values) == dict.fromkeys(SETTINGS, "insufficient") and of(values, "up") == {"": 1.0}
    assert of(values, "last_success_timestamp_seconds") == {"": MADE}

    broken = failed(TuningError("unreachable", "down", "start it"))
    values = read(exposition(Advice.of(broken, MADE, last_success_s=MADE - 900)))
    assert in_force(values) == {} and of(values, "up") == {"": 0.0}
    assert of(values, "timestamp_seconds") == {"": MADE}
    assert of(values, "last_success_timestamp_seconds") == {"": MADE - 900}
    assert of(read(exposition(Advice.of(broken, MADE))), "last_success_timestamp_seconds") == {}


def test_every_declared_metric_is_exposed_with_its_labels_and_no_other() -> None:
    made = document(
        *(recommendation(s, "change", recommended=1, interval=[0, 2]) for s in (TTL, THRESHOLD)),
    )
    families = {f.name: f for f in text_string_to_metric_families(exposition(Advice.of(made, MADE)))}
    assert set(families) == {metric.name for metric in emitted_by("suggest")}
    for name, family in families.items():
        metric = BY_NAME[name]
        assert (family.type, family.documentation) == ("gauge", metric.help)
        assert {tuple(s.labels.values()) for s in family.samples} == set(metric.initial()), name
        assert all(tuple(s.labels) == metric.label_names() for s in family.samples), name


def test_advice_from_a_recording_is_what_its_document_says(snapshots: Snapshots) -> None:
    made = suggest_snapshots(snapshots(pool=1_500_000, interval=120.0))
    values = read(exposition(Advice.of(made, MADE)))
    for one in made["recommendations"]:
        setting = one["setting"]
        assert of(values, "recommended").get(setting) == one["recommended"]
        assert in_force(values)[setting] == one["status"]
        low, high = one["interval"] or (None, None)
        assert (of(values, "interval_low").get(setting), of(values, "interval_high").get(setting)) == (low, high)
    assert "change" in in_force(values).values(), "the case is one with advice"


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_file_is_replaced_whole_and_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "kvtune.prom"
    path.write_text("old\n")
    path.chmod(0o600)
    kept_open = path.open()
    write_export(path, Advice.of(document(recommendation(TTL, "keep", recommended=480)), MADE))
    assert kept_open.read() == "old\n", "who reads the old one reads all of it"
    kept_open.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert of(read(path.read_text()), "recommended") == {TTL: 480.0}
    assert os.listdir(tmp_path) == ["kvtune.prom"], "nothing is left behind"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvtune.prom"
    path.write_text("old\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtune_tuning.recording.os.replace", full)
    with pytest.raises(TuningError, match=r"kvtune\.prom: No space left on device") as caught:
        write_export(path, Advice(MADE, False, None))
    assert caught.value.code == "cannot_write"
    assert os.listdir(tmp_path) == ["kvtune.prom"] and path.read_text() == "old\n"


def test_files_that_no_collector_would_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not end in \.prom"):
        check_export(tmp_path / "kvtune.txt")
    with pytest.raises(UsageError, match="no such directory"):
        check_export(tmp_path / "missing" / "kvtune.prom")
    (tmp_path / "dir.prom").mkdir()
    with pytest.raises(UsageError, match="not a file"):
        check_export(tmp_path / "dir.prom")
    check_export(tmp_path / "new.prom")


# --- the watch ------------------------------------------------------------------------------------------------------


class Hours:
    """A clock that stands still but for what `pause` adds."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    def unix(self) -> float:
        return MADE + self.s

    async def sleep(self, seconds: float) -> None:
        self.s += seconds


class Lab:
    """Runs a watch whose rounds get the answers that were prepared, and reads what it serves after each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[Any], slow: float = 0.0) -> None:
        self.pending, self.slow = list(answers), slow
        self.clock, self.out, self.err = Hours(), io.StringIO(), io.StringIO()
        self.pages: list[Values] = []
        self.pauses: list[float] = []
        self.whenever: Callable[[int], None] = lambda _: None
        monkeypatch.setattr(watching, "answer", self.answer)

    def answer(self, *_: object) -> tuple[dict[str, Any], TuningError | None]:
        self.clock.s += self.slow
        one = self.pending.pop(0)
        return (failed(one), one) if isinstance(one, TuningError) else (one, None)

    def pause(self, seconds: float) -> None:
        address = json.loads(self.out.getvalue())["metrics"]
        with urllib.request.urlopen(address) as page:
            self.pages.append(read(page.read().decode()))
        self.pauses.append(seconds)
        self.whenever(len(self.pages))
        self.clock.s += seconds
        if not self.pending:
            signal.raise_signal(signal.SIGTERM)

    def run(self, **options: Any) -> int:
        return run_watch(
            Question(prometheus="http://p"), Watch(port=0, **options), stdout=self.out, stderr=self.err,
            clock=self.clock, pause=self.pause,
        )  # fmt: skip


DOWN = TuningError("unreachable", "http://p: connection refused", "Start it.")
GOOD = document(
    recommendation(TTL, "change", recommended=360), recommendation(THRESHOLD, "keep", current=64, recommended=64)
)


def test_rounds_that_fail_are_survived_and_take_their_numbers_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab = Lab(monkeypatch, [DOWN, GOOD, DOWN, GOOD])
    file = tmp_path / "kvtune.prom"
    written = []
    lab.whenever = lambda _: written.append(read(file.read_text()))
    before = signal.getsignal(signal.SIGTERM)
    assert lab.run(every="10m", export=file) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert [of(page, "up")[""] for page in lab.pages] == [0, 1, 0, 1]
    assert [of(page, "recommended").get(TTL) for page in lab.pages] == [None, 360, None, 360]
    assert [of(page, "timestamp_seconds")[""] - MADE for page in lab.pages] == [0, 600, 1200, 1800]
    successes = [of(page, "last_success_timestamp_seconds").get("") for page in lab.pages]
    assert successes == [None, MADE + 600, MADE + 600, MADE + 1800]
    assert written == lab.pages, "the file says what is served"
    lines = lab.err.getvalue().splitlines()
    assert len(lines) == 4, lines
    assert "ERROR" in lines[0] and lines[0].endswith("no advice: http://p: connection refused Start it.")
    assert lines[1].endswith(
        "decoder_kv_blocks_ttl 480 -> 360 seconds: change; kv_recompute_threshold 64 tokens: keep (window 3600 s)"
    )


def test_rounds_keep_to_their_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, [GOOD] * 3, slow=130.0)
    assert lab.run(every="1m") == 0
    assert lab.pauses == [50.0, 50.0, 50.0], "the two rounds that were missed are not caught up"


def test_logs_can_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, [GOOD])
    assert lab.run(log_format="json") == 0
    line = json.loads(lab.err.getvalue())
    assert line["level"] == "INFO" and line["message"].startswith("decoder_kv_blocks_ttl 480 -> 360")
    assert json.loads(lab.out.getvalue())["every_seconds"] == 900


def test_what_will_never_work_ends_it_at_once_and_later_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = UsageError("bad_file", "--bearer-token-file: /t: No such file", "Give a file.")
    lab = Lab(monkeypatch, [gone])
    assert lab.run() == 2 and lab.pages == []
    assert lab.err.getvalue() == "kvtune: --bearer-token-file: /t: No such file\nGive a file.\n"
    lab = Lab(monkeypatch, [GOOD, gone, GOOD])
    assert lab.run() == 0
    assert [of(page, "up")[""] for page in lab.pages] == [1, 0, 1]


def test_a_file_that_cannot_be_written_ends_it_only_the_first_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "textfile"
    place.mkdir()

    def gone(*_: object) -> None:
        raise TuningError("cannot_write", "--export: gone", "Bring it back.")

    lab = Lab(monkeypatch, [GOOD, GOOD])
    lab.whenever = lambda _: monkeypatch.setattr(watching, "write_export", gone)
    assert lab.run(export=place / "k.prom") == 0
    assert "ERROR   --export: gone Bring it back." in lab.err.getvalue() and len(lab.pages) == 2
    lab = Lab(monkeypatch, [GOOD])
    assert lab.run(export=place / "k.prom") == 1 and lab.pages == []


@pytest.mark.parametrize(
    ("question", "watch", "why"),
    [
        (Question(scrape=["h:1"]), Watch(), "--watch with --scrape"),
        (Question(snapshot="x"), Watch(), "--watch with --snapshot"),
        (Question(), Watch(), "--watch without a server"),
        (Question(prometheus="p", samples=Path("x")), Watch(), "--samples with --watch"),
        (Question(prometheus="p"), Watch(every="0s"), "--every: not a positive duration: '0s'"),
        (Question(prometheus="p"), Watch(port=70_000), "--port 70000: no such port"),
        (Question(prometheus="p"), Watch(log_format="xml"), "--log-format: unknown format 'xml'"),
        (Question(prometheus="p"), Watch(export=Path("x.txt")), "--export: x.txt: the name does not end in .prom"),
        (Question(prometheus="p"), Watch(port=0, host="192.0.2.1"), "--host 192.0.2.1 --port 0: "),
    ],
)
def test_what_makes_no_sense_in_a_watch_is_refused(question: Question, watch: Watch, why: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert run_watch(question, watch, stdout=out, stderr=err, clock=Hours()) == 2
    assert out.getvalue() == "" and err.getvalue().startswith(f"kvtune: {why}")
    assert len(err.getvalue().splitlines()) == 2, "what, and what to do"
