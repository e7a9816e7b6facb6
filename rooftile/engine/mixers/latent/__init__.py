"""Multi-head latent attention: the cache has one latent a token, whatever the number of heads."""
