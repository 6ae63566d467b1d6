"""What is raised when a model cannot be used."""


class ModelError(ValueError):
    """The model cannot be used; the message says why and what to do."""
