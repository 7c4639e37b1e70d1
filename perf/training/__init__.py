"""Training through the box, measured: schemes on the network laboratory. `python -m perf.training`.

seasgd.py       SEASGD's iteration on 1 to 8 memory servers, for the parameter sets of five networks
worker.py       a training process: does what it is told, line by line
"""
