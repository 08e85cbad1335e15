"""mhc.expand: one stream to n equal ones, at the model's entry."""
