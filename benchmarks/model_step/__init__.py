"""One training step of a small model with DeepSeek-V4's shapes, its hyper-connections computed in several ways."""
