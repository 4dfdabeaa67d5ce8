"""The vocabulary of kvtune: clocks, closed enums, events, the metric catalogue, and the recorder that alone knows the sinks."""
