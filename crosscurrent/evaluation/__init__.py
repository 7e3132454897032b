"""Measuring models: how well they do on lengths they were not trained on."""
