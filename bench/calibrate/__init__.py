"""The parts of `specq bench calibrate`: `hardware` measures the pair of models, `neighbours` what the pair's processes
take from each other, `serving` runs real processes over a network with delays, `costs` measures in such service what
they take besides their models, `usage` and `steps` read what processes and steps took, `compare` sets what was served
beside the simulator's prediction."""
