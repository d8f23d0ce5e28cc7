"""The parts of `specq bench calibrate`.

hardware      measures the pair of models.
neighbours    measures how much the pair's processes slow each other down.
serving       runs real processes over a network with delays.
costs         measures in such service the costs of processes besides their models.
usage, steps  the processor time of processes, and the figures of steps.
compare       measured figures beside the simulator's prediction.
"""
