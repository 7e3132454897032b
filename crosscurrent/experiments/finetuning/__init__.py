"""Fine-tuning pretrained models on reasoning tasks, with and without a recurrence, and comparing what comes out."""
