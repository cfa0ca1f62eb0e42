"""Golden data: prompts, a small trained checkpoint, recorded digests."""
