"""A script in place of a model: imported beside a server's engine, it says what the model answers."""
