"""E4: more arithmetic on the same bytes, and the time that it adds."""
