"""The seconds of steps and the tokens of drafts, learned in service. Pure: seconds and counts are arguments.

step_curve   the seconds of a step by its rows, as expected at start-up.
step_time    corrections to that, learned from the steps in service.
token_yield  how many drafted tokens are accepted, by source and level.
ridge        the regression that learns seconds.
goodput      expected tokens per expected second: the rule for every choice.
"""
