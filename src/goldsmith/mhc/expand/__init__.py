"""mhc.expand: copies one stream to n equal ones at the entry of the model."""
