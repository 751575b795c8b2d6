"""Everything that must be exact: sampling, acceptance, stopping, text, and the session and round built on them."""
