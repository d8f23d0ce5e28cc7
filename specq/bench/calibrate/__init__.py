"""The parts of `specq bench calibrate`: `hardware` measures the pair of models and this machine, `neighbours` what the pair's
processes take from each other, `sockets` what a message takes, `serving` runs real processes over a network with delays,
`compare` sets what they did beside the simulator's prediction."""
