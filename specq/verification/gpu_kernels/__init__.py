"""Triton kernels; imported only where they run, on a GPU or under Triton's interpreter."""
