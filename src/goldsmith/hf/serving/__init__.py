"""An OpenAI-compatible server on an offloaded model: requests that are checked, batched steps, streamed answers."""
