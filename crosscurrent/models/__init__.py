"""The models. Each folder holds one, laid out as in transformers; what they share lies beside the folders."""
