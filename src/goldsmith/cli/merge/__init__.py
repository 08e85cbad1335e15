"""`goldsmith merge`: an adapter merged into its base model."""
