"""The theory of sticky sampling: return probabilities, staleness, variance, and the choice of sizes."""
