"""Replays recorded conversations against a model of a prefill/decode deployment: what a setting would have given."""
