"""Simulated engines with vLLM's bidirectional contract, real traces, load, charts and the demo."""
