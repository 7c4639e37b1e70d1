"""How the box scales: over servers behind links of their own, over clients, over connections. `python -m perf.scaling`.

fleet.py        a coordinator, memory servers and client processes, on a lab's hosts or on loopback
worker.py       a client process: does what it is told, line by line
links.py        bare sockets over the same links: what nothing can beat
servers.py, clients.py, coordinator.py: the questions
runs.py         one measurement, bytes checked
report.py       answers as JSON, tables and plots
"""
