"""Triton kernels for `specq.verification.cuda_rows`: own tokens and distributions of rows of logits.

Each row is read two or three times, and twice more, in part, where a token is drawn.

`specq.verification.sampling` defines the values. In the order in which they run: `tops_kernel` and `heads_kernel` of
heads.py, `distributions_kernel`, `choose_kernel`; then `probs_kernel` of lookups.py, and `chunks_kernel` and `draw_kernel` of draws.py;
rows.py is what they share.

Where the grid is (rows, splits), program (row, split) has the blocks split, split + splits, ... of the row, and what the
programs find is combined by whoever reads it. These programs are one warp each, so that their many small reductions need no
barrier. What a kernel is compiled for depends on the vocabulary and the type of the logits alone.

Imported only where they run, on a GPU or under Triton's interpreter.
"""
