"""All that speaks to SGLang servers."""
