"""Two API servers as `--api-server-count 2` makes them: processes that share PROMETHEUS_MULTIPROC_DIR.

    api_servers.py MODEL_DIRECTORY

Prints what a scrape of either would show, as JSON: `name{labels}` to value.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Decision, Direction, End, Reason

FETCHED = events.PrefillDecided(Decision.FETCH, Reason.NONE, 700, 0, 640, 640)
READ = events.KvRead(Direction.D2P, 640, 2000, 0.25, 0.5)
STARTED = events.RetentionStarted(200, 13)
ENDED = events.RetentionEnded(End.READ, 200, 13, 9.0)
HEARD: list[list[tuple[int, list[Any]]]] = [
    # Each server hears of some steps of either engine: a holding may end where it did not begin.
    [(0, [STARTED, STARTED, FETCHED, READ]), (1, [STARTED])],
    [(0, [ENDED, FETCHED]), (1, [ENDED, STARTED])],
]


def serve(model: str, heard: list[tuple[int, list[Any]]]) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm_harness import settings_of

    from kvtune_connector.nixl_stats import of_events

    server = PrometheusStatLogger(settings_of(Path(model)), [0, 1])
    for engine, found in heard:
        stats = of_events(found)
        assert stats is not None
        server.record(SchedulerStats(kv_connector_stats=stats.to_dict()), None, engine_idx=engine)


def main() -> None:
    from vllm.v1.metrics.prometheus import get_prometheus_registry, setup_multiprocess_prometheus

    setup_multiprocess_prometheus()
    # Imported once; a forked server has its own process id, and that is all that tells its files apart.
    import vllm_harness  # noqa: F401

    forked = multiprocessing.get_context("fork")
    servers = [forked.Process(target=serve, args=(sys.argv[1], heard)) for heard in HEARD]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
        assert server.exitcode == 0
    shown = {
        f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()) if k != 'model_name')}}}": (
            sample.value
        )
        for family in get_prometheus_registry().collect()
        for sample in family.samples
        if sample.name.startswith("kvtune_")
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
