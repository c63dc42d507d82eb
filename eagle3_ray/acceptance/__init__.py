"""What a drafter is worth: its acceptance length in the engine, by a reference decoder, and by replay."""
