"""The layouts in which others store quantised weights: each file turns tensors and a configuration into `QuantisedWeight`s."""
