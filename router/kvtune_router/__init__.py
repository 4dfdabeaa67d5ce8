"""The router in front of a prefill/decode fleet: turns, conversations, engines, relay."""
