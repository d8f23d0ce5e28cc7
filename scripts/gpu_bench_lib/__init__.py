"""The parts of scripts/gpu_bench.py, one measurement a file; each returns plain dicts for the report.

models      the inflated pair, made on the device
timing      device clocks: graphs, events, bandwidth
compiling   kernels compiled beforehand by many processes
tiles       how fast each product of a layer is with which tile
steps       engine steps: sessions x drafted nodes
chains      draft steps: chains and single passes
profile     where a step's time goes, kernel by kernel
speculation greedy text against the small pair, and speculation in one process
"""
