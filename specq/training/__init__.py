"""Training: from text to checkpoints in Hugging Face layout.

`pair` trains a small target and a draft for it, from scratch. Its stages are a table. Each stage reads and writes files
in the work directory, so that a run can stop and continue at any stage:

    tokenizer   corpus         a byte-level BPE that both models share
    data        corpus         the corpus as token ids, some documents held out
    target      pretrain       next-token training
    rollouts    rollouts       the target's answers to prompts of the corpus
    draft       distil         the draft learns the target's distributions
    evaluate    report         losses, and how often the target accepts the draft
    export      report         both models, ready to serve

Five methods train for an existing target. They share the stage `rollouts` in `answering`. The other stages are in the
module of the method's name:

    draft       distils a draft model, into the form of `specq.checkpoints.draft_form`
    medusa      trains Medusa heads, in `specq.drafting.medusa.form`
    eagle       trains an EAGLE-3 head, in `specq.drafting.eagle3.form`
    block       trains a block drafter, in `specq.drafting.block.form`
    parallel    turns a draft model into one that predicts several tokens in one pass

Rule: no training stage reads the benchmark prompts that `evaluate` reads.

To add a method: write its stages in a module and add their table here. Add a command in `specq.cli` and a line in the
table of `specq train`. `optimizer`, `decoding` and `architecture` serve all methods. `runs`, `heads` and `foresight`
serve all methods for an existing target except `draft`.
"""

DRAFT_STAGES = {  # in order
    "rollouts": "specq.training.answering:roll_out",
    "draft": "specq.training.draft:distil",
    "evaluate": "specq.training.draft:evaluate",
}
EAGLE_STAGES = {  # in order
    "rollouts": "specq.training.answering:roll_out",
    "head": "specq.training.eagle:train_head",
    "evaluate": "specq.training.eagle:evaluate",
}
BLOCK_STAGES = {  # in order
    "rollouts": "specq.training.answering:roll_out",
    "drafter": "specq.training.block:train_drafter",
    "evaluate": "specq.training.block:evaluate",
}
MEDUSA_STAGES = {  # in order
    "rollouts": "specq.training.answering:roll_out",
    "heads": "specq.training.medusa:train_heads",
    "evaluate": "specq.training.medusa:evaluate",
}
PARALLEL_STAGES = {  # in order
    "rollouts": "specq.training.answering:roll_out",
    "draft": "specq.training.parallel:train_draft",
    "evaluate": "specq.training.parallel:evaluate",
}
PAIR_STAGES = {  # in order
    "tokenizer": "specq.training.pair:train_tokenizer",
    "data": "specq.training.pair:tokenize_corpus",
    "target": "specq.training.pair:train_target",
    "rollouts": "specq.training.pair:roll_out",
    "draft": "specq.training.pair:distil_draft",
    "evaluate": "specq.training.pair:evaluate",
    "export": "specq.training.pair:export",
}
