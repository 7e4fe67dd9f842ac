"""How groups are laid out: trees of tokens, and the packed rows that a model runs."""
