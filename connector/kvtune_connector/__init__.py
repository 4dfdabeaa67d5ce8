"""The connector: when KV may be reused, proof that it is the right KV, and what retention costs.

`policy`, `fingerprint`, `retention`, `wire` and `settings` are pure (no vLLM, no I/O, no clock); simulated engines run
them too. The binding to vLLM is loaded when vLLM asks for it:

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvtune_connector", ...}'
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """vLLM imports `NixlConnector` from here; nothing else should pay for importing vLLM."""
    if name == "NixlConnector":
        from kvtune_connector.nixl import NixlConnector

        return NixlConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
