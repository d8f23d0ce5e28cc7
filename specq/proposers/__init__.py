"""The former name of `specq.drafting`, for packages written for it. The next version removes it."""

# ruff: noqa: F401
from specq.drafting import *  # noqa: F403
from specq.drafting import ChainDrafter as ChainSource
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.eagle3.levels import BEAM, WIDTH
from specq.drafting.interface import NodeChains as ProposerChains
from specq.drafting.medusa.interface import HeadSource, HiddenRow
from specq.drafting.suffix import DEPTH as SUFFIX_DEPTH
from specq.drafting.suffix import NO_TEXT, TOO_OLD, NotReady, SuffixTexts, SuffixTree, TextDrafts
from specq.drafting.suffix import Requests as SuffixRequests
from specq.drafting.suffix import make_texts as make_suffix_texts
from specq.drafting.suffix import make_tree as make_suffix_tree
from specq.drafting.trees.interface import DeviceNodes, Grown, TreeHead, TreeRequest
from specq.drafting.trees.ranked import Ranked
from specq.verification import NO_TOKEN
from specq.verifier.sources import Followed
