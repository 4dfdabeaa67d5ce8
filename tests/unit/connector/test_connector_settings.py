from __future__ import annotations

from typing import Any

import pytest

from kvtune_connector.settings import ConnectorSettings, SettingsError, check_version, read_settings


def test_defaults_are_vllms_own() -> None:
    assert read_settings({}) == ConnectorSettings(False, 480.0, 64)
    assert read_settings({"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 120}).ttl_s == 120.0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kvtune": {"requre_fingerprint": True}}, "unknown key 'requre_fingerprint' under kvtune; known are"),
        ({"kvtune": 7}, "kvtune must be an object"),
        ({"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 5}, "decoder_kv_blocks_ttl = 5: the reader refuses"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold = -1"),
        ({"kv_recompute_threshold": 1.5}, "kv_recompute_threshold = 1.5"),
        ({"kv_recompute_threshold": "64"}, "kv_recompute_threshold = '64': it must be a number"),
        ({"bidirectional_kv_xfer": "yes"}, "bidirectional_kv_xfer = 'yes': it must be true or false"),
        ({"kvtune": {"idle_sleep_ms": 1000}}, "idle_sleep_ms = 1000"),
        ({"kvtune": {"progress_thread": 1}}, "progress_thread = 1"),
        ({"bidirectional_kv_xfer": True, "kvtune": {"min_retain_s": 900}}, "min_retain_s = 900"),
        ({"decoder_kv_blocks_ttl": float("nan")}, "decoder_kv_blocks_ttl = nan"),
    ],
)
def test_bad_settings_are_named_at_start(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        read_settings(extra)


@pytest.mark.parametrize(("asked", "granted"), [(None, 480.0), (0.0, 0.0), (3.0, 6.0), (100.0, 100.0), (9000.0, 480.0)])
def test_what_a_router_may_ask_is_bounded(asked: float | None, granted: float) -> None:
    assert ConnectorSettings(bidirectional=True).retention_s(asked) == granted


def test_untested_versions_need_a_word() -> None:
    check_version("0.32.0", None)
    check_version("0.32.0+cpu", None)
    check_version("0.40.0", "0.40.0")
    with pytest.raises(
        SettingsError, match=r"tested with 0\.32\.0, not 0\.40\.0; set KVTUNE_ALLOW_UNTESTED_VLLM=0\.40"
    ):
        check_version("0.40.0", None)
    with pytest.raises(SettingsError, match=r"not 0\.41\.0"):
        check_version("0.41.0", "0.40.0")
