"""The drafters that a draft worker can be given, by name."""

from __future__ import annotations

from specq.runtime import Table

PROPOSERS = Table(
    "proposer",
    "specq.drafters",
    {
        "draft-model": "specq.drafting.draft_model.spec:DRAFT_MODEL",
        "eagle3": "specq.drafting.eagle3.spec:EAGLE3",
        "ngram": "specq.drafting.suffix.ngram:NGRAM",
        "vllm": "specq.drafting.vllm.spec:VLLM",
    },
    former="specq.proposers",  # for one version
)
