"""`RankEnded`: the end of a rank."""


class RankEnded(RuntimeError):
    """A rank of an engine has ended or does not answer, so the engine computes no more."""
