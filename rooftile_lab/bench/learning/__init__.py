"""The study of what a model loses by its attention: small decoders, trained with each method on recall and on English."""
