"""What scripts/gpu_end_to_end.py is made of: the prompts that all get, specq's deployments, and its rivals."""
