"""shoal plans, proves, runs and shows how a large language model is split over many processors."""

__version__ = "0.1.0"
