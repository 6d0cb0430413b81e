"""What a client does in a round: local training, residuals, evaluation."""
