"""The connector: when KV may be reused, proof that it is the right KV, and what retention costs.

`policy`, `fingerprint`, `retention` and `wire` are pure (no vLLM, no I/O, no clock); simulated engines run them too.
"""
