"""Measuring drafts on recorded answers of the target: prompts, recording, costs, the run, how it is shown."""
