"""From the scheduler's step to `/metrics` and the log line, through vLLM's own loggers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_harness import Engine, reference, settings_of, tokens

from kvtune_connector.nixl_stats import EVENTS, ConnectorStats, _forget, of_events
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Decision, Direction, End, Reason

Make = Callable[..., Engine]
HISTORY = tokens(640)
EVERY = [
    events.PrefillDecided(Decision.FETCH, Reason.NONE, 700, 0, 640, 640),
    events.PrefillComputed(60, 0.5),
    events.KvRead(Direction.D2P, 640, 2000, 0.25, 0.5),
    events.KvReadFailed(Direction.P2D),
    events.KvReadDeclined(),
    events.KvLateNotification(),
    events.RetentionStarted(200, 13),
    events.RetentionEnded(End.LAPSED, 200, 13, 480.0),
]


@pytest.fixture
def logged(model: Path) -> Iterator[PrometheusStatLogger]:
    """vLLM's Prometheus logger of two engines."""
    yield PrometheusStatLogger(settings_of(model), [0, 1])
    unregister_vllm_metrics()
    _forget(REGISTRY)


def shown(name: str, engine: int = 0, **labels: str) -> float | None:
    """A sample of the process's registry."""
    found = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
        and sample.labels.get("engine") == str(engine)
        and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def shipped(stats: Any) -> SchedulerStats:
    """Statistics after their journey from the engine to the API server."""
    data = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(data).scheduler_stats
    assert arrived is not None
    return arrived


def test_a_steps_events_reach_the_metrics(engine: Make, logged: PrometheusStatLogger) -> None:
    p = engine()
    turn = p.add(HISTORY + tokens(60, 1), reference(HISTORY))
    for moved in ({}, {"read": [turn.request_id]}, {}):
        p.step(**moved)
        for batch in p.outputs.values():
            logged.record(shipped(batch.scheduler_stats), None, engine_idx=1)
    assert shown("kvtune_decisions_total", 1, decision="fetch", reason="none") == 1
    assert shown("kvtune_decisions_total", 1) == 1
    assert shown("kvtune_kv_read_bytes_total", 1, direction="d2p") == 1000
    assert shown("kvtune_prompt_tokens_total", 1, source="fetched") == 640
    assert shown("kvtune_prompt_tokens_total", 1, source="computed") == 60
    assert shown("kvtune_decisions_total", 0) == 0
    assert shown("kvtune_connector_setting", 1, setting="kv_pool_tokens", role="prefill") == 200 * 16


def test_every_kind_of_event_survives_the_journey(logged: PrometheusStatLogger) -> None:
    stats = of_events(EVERY)
    assert stats is not None
    arrived = shipped(SchedulerStats(kv_connector_stats=stats.to_dict()))
    logged.record(arrived, None, engine_idx=0)
    assert shown("kvtune_path_seconds_total", path="recompute") == 0.5
    assert shown("kvtune_kv_reads_failed_total", direction="p2d") == 1
    assert shown("kvtune_kv_reads_declined_total") == 1
    assert shown("kvtune_kv_late_notifications_total") == 1
    assert shown("kvtune_retentions_total") == 1
    assert shown("kvtune_retentions_ended_total", end="lapsed") == 1
    assert shown("kvtune_retained_requests") == 0
    assert shown("vllm:nixl_xfer_time_seconds_count") == 0


def test_a_kind_of_event_it_does_not_know_is_dropped_alone(logged: PrometheusStatLogger) -> None:
    stats = of_events([EVERY[0]])
    assert stats is not None
    stats.data[EVENTS] = [["Melted", 1], ["KvRead", "sideways", 1, 1, 1, 1], *stats.data[EVENTS]]
    logged.record(shipped(SchedulerStats(kv_connector_stats=stats.to_dict())), None, engine_idx=0)
    assert shown("kvtune_decisions_total") == 1


def test_the_log_line_is_nixls(model: Path) -> None:
    lines: list[str] = []
    log = KVConnectorLogging(settings_of(model).kv_transfer_config)

    def say(text: str, *about: Any) -> None:
        lines.append(text % about)

    ours = of_events(EVERY)
    assert ours is not None
    arrived = shipped(SchedulerStats(kv_connector_stats=ours.to_dict()))
    log.observe(arrived.kv_connector_stats)
    log.observe(arrived.kv_connector_stats)
    log.log(say)
    assert lines == []
    nixl = ConnectorStats()
    nixl.data["transfer_duration"].append(0.5)
    for key in ("post_duration", "bytes_transferred", "num_descriptors"):
        nixl.data[key].append(2**20)
    # The scheduler's are merged into the worker's, as in a step with both.
    log.observe(shipped(SchedulerStats(kv_connector_stats=nixl.aggregate(ours).to_dict())).kv_connector_stats)
    log.log(say)
    log.log(say)
    assert len(lines) == 1
    assert lines[0].startswith("KV Transfer metrics: Num successful transfers=1, Avg xfer time (ms)=500.0,")
    assert lines[0].endswith("Num notifs after expiry=0")


@pytest.mark.parametrize("ours_first", [True, False])
def test_statistics_of_workers_and_scheduler_merge(ours_first: bool) -> None:
    nixl, ours = ConnectorStats(), of_events(EVERY)
    assert ours is not None and not ours.is_empty() and nixl.is_empty()
    nixl.data["num_failed_transfers"].append(1)
    whole = ours.aggregate(nixl) if ours_first else nixl.aggregate(ours)
    assert (len(whole.data[EVENTS]), whole.data["num_failed_transfers"]) == (len(EVERY), [1])


@pytest.mark.parametrize("ours_first", [True, False])
def test_statistics_without_events_merge(ours_first: bool) -> None:
    """A stock side's have none, nor have those for the log line."""
    stock, ours = ConnectorStats(data=dict(NixlKVConnectorStats().data)), of_events(EVERY)
    assert ours is not None and EVENTS not in stock.data
    whole = ours.aggregate(stock) if ours_first else stock.aggregate(ours)
    assert len(whole.data[EVENTS]) == len(EVERY)


def test_several_api_servers_add_up(model: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("api_servers.py")), str(model)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])

    def total(name: str, engine: int, **labels: str) -> float:
        wanted = [f"{k}={v}" for k, v in {"engine": str(engine), **labels}.items()]
        series = [value for key, value in found.items() if key.startswith(name + "{") and all(w in key for w in wanted)]
        assert len(series) == 1, (name, series)
        return float(series[0])

    # Counters and sums add up; what one server saw begin and the other end is not held any more.
    assert total("kvtune_decisions_total", 0, decision="fetch", reason="none") == 2
    assert total("kvtune_kv_wait_seconds_count", 0, direction="d2p") == 1
    assert total("kvtune_retentions_total", 0) == 2
    assert total("kvtune_retentions_total", 1) == 2
    for engine in (0, 1):
        assert total("kvtune_retained_requests", engine) == 1
        assert total("kvtune_retained_tokens", engine) == 200
        assert total("kvtune_retained_blocks", engine) == 13
        # Not doubled: the same in either server.
        assert total("kvtune_connector_setting", engine, setting="decoder_kv_blocks_ttl") == 480
        assert total("kvtune_connector_setting", engine, setting="kv_recompute_threshold") == 64
        assert total("kvtune_connector_build_info", engine) == 1
    assert [key for key in found if "pid=" in key] == []
