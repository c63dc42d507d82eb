"""All that knows the target model."""
