"""The former name of `specq.drafting`, for packages written for it. It goes with the next version."""

from specq.drafting import *  # noqa: F403
