"""E5: the operator on data that stays in the cache, so that its bytes from memory go away and its arithmetic stays."""
