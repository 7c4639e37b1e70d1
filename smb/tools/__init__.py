"""The command line and what it runs: bench, demo, doctor."""
