"""Triton kernels for `specq.verification.cuda_rows`: own tokens, distributions and drafted trees of rows of logits.

`specq.verification.sampling` defines the values. In order of execution, if they run:

- `tops_kernel`, `heads_kernel` and `weigh_kernel` of heads.py.
- `distributions_kernel` of distributions.py.
- For drafted trees: `walk_kernel` or `longest_kernel` of paths.py, else `probs_kernel` of distributions.py.
- For grammars, before all others: `mask_kernel` of rows.py.
- For own tokens: `choose_kernel` and `pick_kernel` of choose.py.
- For draws: `chunks_kernel` and `draw_kernel` of rows.py, which also has the shared functions.

How often a row is read: once for its largest logit. Once if its distribution is needed. Once for its own token at T >
0, unless top-k or top-p keep few tokens. For a drawn token, once and then one chunk again.

With a grid (rows, splits), program (row, split) has the blocks split, split + splits, ... of the row. The reader
combines the programs' results. These programs are one warp each, so that their many small reductions need no barrier. A
compiled kernel depends only on the vocabulary and the type of the logits.

The kernels are imported only where they run, on a GPU or under Triton's interpreter.
"""

KERNELS = {
    "mask": "specq.verification.gpu_kernels.rows:mask_kernel",
    "tops": "specq.verification.gpu_kernels.heads:tops_kernel",
    "heads": "specq.verification.gpu_kernels.heads:heads_kernel",
    "weigh": "specq.verification.gpu_kernels.heads:weigh_kernel",
    "distributions": "specq.verification.gpu_kernels.distributions:distributions_kernel",
    "choose": "specq.verification.gpu_kernels.choose:choose_kernel",
    "probs": "specq.verification.gpu_kernels.distributions:probs_kernel",
    "chunks": "specq.verification.gpu_kernels.rows:chunks_kernel",
    "draw": "specq.verification.gpu_kernels.rows:draw_kernel",
    "pick": "specq.verification.gpu_kernels.choose:pick_kernel",
    "walk": "specq.verification.gpu_kernels.paths:walk_kernel",
    "longest": "specq.verification.gpu_kernels.paths:longest_kernel",
}
