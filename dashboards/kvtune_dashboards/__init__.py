"""Grafana dashboards and Prometheus rules, built from the metric catalogue."""
