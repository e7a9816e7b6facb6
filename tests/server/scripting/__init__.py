"""What a server's engine imports beside itself, so that a script says what its model answers."""
