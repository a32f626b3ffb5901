"""What plugin authors test with: tiny models, oracles, adversarial drafters, Hypothesis strategies, state machines."""
