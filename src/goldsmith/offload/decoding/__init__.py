"""A decoder model's step from token to token as one call of the native library; the experts come from an engine."""
