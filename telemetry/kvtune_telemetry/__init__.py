"""Clocks, closed enums, events, the metric catalogue, and the recorder that alone knows where they go."""
