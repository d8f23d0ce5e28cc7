"""The torch engine on an NVIDIA GPU.

forward         through Triton kernels and CUDA graphs: layers, taps (hidden states), tiles (sizes), weights (their
                layout)
attention_plan  what attention computes in a step, laid out by C
chain           chains of draft tokens; top: the best tokens of each row
gpu_kernels     the Triton kernels
replays         numbers to a device and back; work of fixed shapes, recorded as CUDA graphs
"""
