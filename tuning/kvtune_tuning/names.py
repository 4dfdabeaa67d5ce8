"""The series the advice is computed from. Nothing else is read from a snapshot, a target or Prometheus."""

from __future__ import annotations

CATALOGUED = (
    "kvtune_turns_total",
    "kvtune_turn_ttft_seconds_sum",
    "kvtune_turn_ttft_seconds_count",
    "kvtune_turn_gap_seconds_bucket",
    "kvtune_turn_gap_seconds_count",
    "kvtune_turn_gap_seconds_sum",
    "kvtune_turn_gap_tokens_bucket",
    "kvtune_turn_gap_tokens_squared_bucket",
    "kvtune_turn_ends_total",
    "kvtune_turn_end_tokens_total",
    "kvtune_turn_end_tokens_squared_total",
    "kvtune_turns_given_up_total",
    "kvtune_conversations_total",
    "kvtune_conversations_remembered",
    "kvtune_engine_restarts_total",
    "kvtune_router_setting",
    "kvtune_decisions_total",
    "kvtune_decision_tokens_total",
    "kvtune_path_observations_total",
    "kvtune_path_tokens_total",
    "kvtune_path_tokens_squared_total",
    "kvtune_path_seconds_total",
    "kvtune_kv_reads_declined_total",
    "kvtune_kv_reads_failed_total",
    "kvtune_kv_late_notifications_total",
    "kvtune_retentions_total",
    "kvtune_retention_tokens_total",
    "kvtune_retention_age_seconds_bucket",
    "kvtune_retained_tokens",
    "kvtune_retained_requests",
    "kvtune_connector_setting",
    "kvtune_connector_build_info",
)
"""Sample names of kvtune's own series."""

VLLM = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prefill_time_seconds_count",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_notifications_after_expiry_total",
)
"""vLLM's own, as of 0.32; `kv_cache_usage_perc` is a fraction, not per cent. NIXL's count once a rank."""

BESIDE_KVTUNE = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "vllm:request_success_total",
)
"""Those of vLLM that are read where kvtune's own are there; the others only stand in for them."""

NEEDED: frozenset[str] = frozenset(CATALOGUED + VLLM)

STORED_AS = {name: name.replace(":", "_") for name in VLLM}
"""What a Prometheus server may hold vLLM's names as.

prometheus_client from 0.22 on writes `_` for the colon in OpenMetrics, unless the scraper accepts
`escaping=allow-utf-8`; Prometheus 2 does not.
"""
_EXPOSED_AS = {stored: name for name, stored in STORED_AS.items()}


def spellings(name: str) -> tuple[str, ...]:
    """A name and what else a server may hold it as."""
    return (name, STORED_AS[name]) if name in STORED_AS else (name,)


def exposed_name(name: str) -> str:
    """The name as vLLM means it, of either spelling; any other name is its own."""
    return _EXPOSED_AS.get(name, name)
