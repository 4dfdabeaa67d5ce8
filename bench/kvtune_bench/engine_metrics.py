"""The `vllm:` series of a simulated engine, under vLLM's names, labels and bucket edges, and its own `sim_` ones.

The number of series is fixed at the start; nothing here grows with requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtune_telemetry.instruments import without_created

ENGINE_INDEX = "0"
"""vLLM's `engine` label of the only data-parallel rank."""
VIOLATIONS = ("late_read", "double_read", "wrong_kv")
"""Kinds of broken promises that a simulated engine can see: KV read after it was freed, KV read twice, and KV of other
tokens taken for the prompt's."""
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")

_XFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_XFER_BYTES = tuple(float(2**power) for power in range(11, 34, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_POST_SECONDS = 0.001


class VllmMetrics:
    """All series of one engine on one registry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        tp: int,
        block_size: int,
        gpu_blocks: int,
        usage: Callable[[], float],
        running: Callable[[], float],
        waiting: Callable[[], float],
    ) -> None:
        without_created()
        names = ("model_name", "engine")
        values = (model_name, ENGINE_INDEX)
        self._tp = tp

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=registry).labels(*values)

        def histogram(name: str, text: str, edges: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, buckets=edges, registry=registry).labels(*values)

        def gauge(name: str, text: str, function: Callable[[], float]) -> None:
            Gauge(f"vllm:{name}", text, names, registry=registry).labels(*values).set_function(function)

        def by(name: str, text: str, label: str, members: Sequence[str]) -> dict[str, Counter]:
            family = Counter(f"vllm:{name}", text, (*names, label), registry=registry)
            return {member: family.labels(*values, member) for member in members}

        gauge("num_requests_running", "Number of requests in model execution batches.", running)
        gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
        self.preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.prompt_source = by("prompt_tokens_by_source", "Prompt tokens by source.", "source", SOURCES)
        self.local_queries = counter("prefix_cache_queries", "Prefix cache queries, in number of queried tokens.")
        self.local_hits = counter("prefix_cache_hits", "Prefix cache hits, in number of cached tokens.")
        self.external_queries = counter(
            "external_prefix_cache_queries", "External prefix cache queries from KV connector, in tokens."
        )
        self.external_hits = counter(
            "external_prefix_cache_hits", "External prefix cache hits from KV connector, in tokens."
        )
        self.ttft = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_SECONDS
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_SECONDS
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase.", _REQUEST_SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase.", _REQUEST_SECONDS
        )
        self.success = by(
            "request_success", "Count of successfully processed requests.", "finished_reason", FINISHED_REASONS
        )
        self._xfer = histogram("nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV.", _XFER_SECONDS)
        self._post = histogram(
            "nixl_post_time_seconds", "Histogram of transfer post time for NIXL KV.", (0.001, *_XFER_SECONDS)
        )
        self._bytes = histogram("nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV.", _XFER_BYTES)
        self._descriptors = histogram(
            "nixl_num_descriptors", "Histogram of number of descriptors per NIXL KV.", _DESCRIPTORS
        )
        self._failed = counter("nixl_num_failed_transfers", "Number of failed NIXL KV cache transfers.")
        self._expired = counter("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.")
        self._late = counter(
            "nixl_num_notifications_after_expiry", "Number of notifications received for KV that had expired."
        )
        Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig.",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=registry,
        ).labels(ENGINE_INDEX, str(block_size), str(gpu_blocks)).set(1)
        violations = Counter(
            "sim_violations", "Broken promises a simulated engine saw, by kind.", ("kind",), registry=registry
        )
        self.violations = {kind: violations.labels(kind) for kind in VIOLATIONS}
        self.leaked = Gauge("sim_leaked_pages", "KV pages that no request will ever give back.", registry=registry)

    def transfer(self, *, seconds: float, size_bytes: int, descriptors: int) -> None:
        """Book a read as vLLM does: once a tensor-parallel rank, each with its share of the bytes."""
        for _ in range(self._tp):
            self._xfer.observe(seconds)
            self._post.observe(min(_POST_SECONDS, seconds))
            self._bytes.observe(size_bytes / self._tp)
            self._descriptors.observe(descriptors)

    def transfer_failed(self) -> None:
        """Book a read that failed on every rank."""
        self._failed.inc(self._tp)

    def expired(self) -> None:
        """Book a lapse, or a read declined for it, on every rank."""
        self._expired.inc(self._tp)

    def late_notification(self) -> None:
        """Book every rank's notification of a read of KV that was freed already."""
        self._late.inc(self._tp)
