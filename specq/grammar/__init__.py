"""Grammars of jobs at the verifier: built by llguidance, followed by the transcript, applied as masks.

- `forms`: a grammar's text to llguidance's.
- `builder`: tries a grammar in another process (`trial_process`, `trial`), then builds it in a thread (`building`).
- `limits`: what a grammar may cost. `place`: where in a schema something is refused.
- `tokenizer`: a model's tokenizer as llguidance has it.
- `session_grammar`: the grammar of one session: what its transcript allows next.
- `commits`: grammars follow what a step commits, and the next masks begin. `mask_rows`: threads and memory for masks.
- `step_masks`: the masks of a step's sessions, for the judge. `draft_masks`: those of one session's drafts.

Input: the JSON text of a grammar (`specq.protocol.grammars`), the tokenizer, committed tokens, draft trees. Output:
masks, forced tokens, and where a text ends. A verifier without llguidance or tokenizer serves no grammars. To add a
kind, add a line in `specq.protocol.grammars` and one in `forms`.
"""

from specq.grammar.builder import GrammarBuilder
from specq.grammar.commits import begin_masks, commit_each
from specq.grammar.draft_masks import DraftMasks
from specq.grammar.limits import limits_of
from specq.grammar.session_grammar import SessionGrammar
from specq.grammar.step_masks import StepMasks
from specq.grammar.tokenizer import GrammarTokenizer

__all__ = [
    "DraftMasks",
    "GrammarBuilder",
    "GrammarTokenizer",
    "SessionGrammar",
    "StepMasks",
    "begin_masks",
    "commit_each",
    "limits_of",
]
