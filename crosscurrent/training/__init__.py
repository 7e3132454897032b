"""Training with the Hugging Face Trainer: curricula, learning rates by width, telemetry, exact resumption."""
