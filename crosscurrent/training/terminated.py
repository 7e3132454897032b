"""The error of a training that a signal ended; by itself, so that the command line need not load a Trainer to know it."""


class TerminatedError(Exception):
    """A signal ended a training; its checkpoint is written.

    Attributes:
        signal_number: of the signal.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
