"""The two demonstrations: tracking a state beyond the training lengths, and retrofitting a pretrained model."""
