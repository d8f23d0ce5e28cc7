"""The parts of `specq bench calibrate`.

hardware      measures the pair of models.
neighbours    measures how much the pair's processes slow each other down.
serving       runs real processes over a network with delays.
costs         measures in such service the costs of processes besides their models.
compare       measured figures beside the simulator's prediction; the figures of steps.
"""
