"""Making drafts for a target: the target's own answers, a draft fitted to them, the result as a zoo entry."""
