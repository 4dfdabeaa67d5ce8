"""From metrics to advice: sources, evidence, TTL and threshold, report. Pure but for the sources."""
