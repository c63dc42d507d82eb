"""The EAGLE-3 drafter: model, training-time test, draft vocabulary and checkpoint layouts; tensors only, no text."""
