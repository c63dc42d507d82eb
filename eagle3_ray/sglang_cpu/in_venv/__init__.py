"""Programs that SGLang's own Python runs by path; eagle3_ray is not installed there, and nothing here imports it."""
