"""Makes EAGLE-3 speculative-decoding drafters for large language models on Ray."""
