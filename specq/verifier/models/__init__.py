"""What steps take and what drafts bring, learned from the steps of a service. Pure: seconds and counts are given.

step_curve   the seconds of a step by its rows, as they were measured at the start
step_time    what the steps of the service say beyond that
token_yield  how many drafted tokens are accepted, by source and level
ridge        the regression by which seconds are learned
goodput      expected tokens by expected seconds: the rule by which everything is chosen
"""
