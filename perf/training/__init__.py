"""Training through the box, measured: schemes on the network laboratory. `python -m perf.training`.

seasgd.py       SEASGD's iteration on 1 to 8 memory servers, for the parameter sets of five networks
race.py         a transformer over 100 Mbit/s: PyTorch's own ways beside ours; race_worker.py one of its two
streaming.py    streaming DiLoCo beside DiLoCo: what a step waits for, bytes, loss
r2sp.py         R2SP beside BSP, ASP and SSP: gaps, staleness, time to a loss; unequal workers
digits.py       the network of r2sp.py, in numpy; digits_worker.py a process that trains it
worker.py       a training process: does what it is told, line by line
"""
