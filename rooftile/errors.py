"""The exceptions that Rooftile raises. A message says what came, what is due, and what to do."""


class InvalidInput(ValueError):
    """An argument is wrong in itself: a shape, a device, a dtype, a number out of its range."""


class Unsupported(NotImplementedError):
    """The problem is well formed, but no backend (or not the one that was named) can run it."""
