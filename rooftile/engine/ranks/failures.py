"""`RankEnded`: the end of a rank."""


class RankEnded(RuntimeError):
    """A rank of an engine has ended or does not answer, so the engine computes no more."""


def timed_out(error: BaseException) -> bool:
    """Tells whether an error of torch.distributed says that another rank has not come in time; it has no class of its own."""
    return "imed out" in str(error)
