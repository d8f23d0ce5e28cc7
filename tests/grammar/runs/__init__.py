"""Runs of grammar jobs over real processes: combinations, kills, mixed loads, hostile neighbours. No tests."""
