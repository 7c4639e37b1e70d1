"""A simulator of clusters: the coordinator's and memory servers' own decisions under a simulated world. README.md."""
