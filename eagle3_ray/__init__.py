"""Makes EAGLE-3 speculative-decoding drafters for large language models on Ray."""

__version__ = "0.1.0"
